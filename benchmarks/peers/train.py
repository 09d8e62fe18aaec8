"""One peer in one setting: `python -m benchmarks.peers.train CONFIG --trainer …`, or the same under torchrun.

    rows before the measured ones ──▶ a step to warm up ──▶ the measured rows, once ──▶ rows, seconds, loss in FILE

Model, parameters that train, rows and step size are those of the config. Labels are what each library makes of a
conversation: the answers' tokens, or (TRL, for rows with images) all tokens; the logits of all places are computed in
both cases.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, List, Value
from transformers import Trainer, TrainerCallback, TrainingArguments

from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.data.sources import RawRow, open_source
from flowtrain.verify.labels import IGNORED
from flowtrain.verify.model import build_model, modules_of
from flowtrain.verify.reference import load_processor
from flowtrain.verify.rows import text_of


class Clock(TrainerCallback):
    """Seconds from the beginning of the first step to the end of the last one."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


class Collator:
    """Rows as the processor returns them for all of a forward at once, padded to the longest."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        conversations = []
        for row in rows:
            pictures = iter(row["images"])
            conversations.append(
                [
                    {**message, "content": [_part(part, pictures) for part in message["content"]]}
                    for message in row["messages"]
                ]
            )
        inputs = dict(
            self.processor.apply_chat_template(
                conversations,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                return_assistant_tokens_mask=True,
                processor_kwargs={"padding": True},
            )
        )
        trained = torch.as_tensor(inputs.pop("assistant_masks")).bool()
        return {**inputs, "labels": inputs["input_ids"].masked_fill(~trained, IGNORED)}


def _part(part: dict[str, Any], pictures: Any) -> dict[str, Any]:
    return {"type": "image", "image": next(pictures)} if part["type"] == "image" else part


def as_parts(row: RawRow) -> list[dict[str, Any]]:
    """The messages with a part for each piece of text and each image."""
    messages = []
    for message in row.messages:
        if isinstance(message["content"], str):
            parts = [{"type": "text", "text": message["content"]}]
        else:
            parts = [{"type": part["type"], "text": part.get("text")} for part in message["content"]]
        messages.append({"role": message["role"], "content": parts})
    return messages


def dataset(rows: Sequence[RawRow]) -> Dataset:
    """Pictures stay as they are stored: decoding is part of what is measured, as it is elsewhere."""
    features = Features(
        {
            "messages": List(
                {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
            ),
            "images": List(Image()),
            "length": Value("int32"),
        }
    )
    made = [
        {
            "messages": as_parts(row),
            "images": [{"bytes": ref.read(), "path": None} for ref in row.images],
            "length": sum(len(text_of(message)) for message in row.messages) + 40 * len(row.images),
        }
        for row in rows
    ]
    return Dataset.from_list(made, features=features)


def model_of(config: Config, weights: Path) -> Any:
    model = build_model(config.model.path, weights, torch.float32, config.model.trust_remote_code)
    parameters = dict(model.named_parameters())
    for name, module in modules_of(model).items():
        parameters[name].requires_grad_(module not in config.frozen)
    return model


def arguments_of(config: Config, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    step_rows = config.train.step.samples
    assert step_rows is not None, "the step is given in rows"
    grouped = options.order == "group_by_length"
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": options.rows,
        "gradient_accumulation_steps": step_rows // options.rows // processes,
        "num_train_epochs": 1,
        "learning_rate": config.train.lr,
        "weight_decay": config.train.weight_decay,
        "max_grad_norm": config.train.clip_norm or 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": options.loaders,
        "train_sampling_strategy": options.order,
        **({"length_column_name": "length"} if grouped else {}),
        # Rows without an image leave the encoder without a gradient.
        "ddp_find_unused_parameters": processes > 1,
    }


def trainer_of(
    options: argparse.Namespace, model: Any, processor: Any, given: dict[str, Any], rows: Dataset
) -> Trainer:
    if options.trainer == "trainer":
        arguments = TrainingArguments(**given)
        return Trainer(model, arguments, data_collator=Collator(processor), train_dataset=rows)
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**given, max_length=None)
    rows = rows.remove_columns("length")
    return SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=processor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.train")
    parser.add_argument("config", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--trainer", choices=("trainer", "sft"), required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of a forward")
    parser.add_argument("--order", default="sequential")
    parser.add_argument("--loaders", type=int, default=0, help="processes that prepare rows")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, required=True, help="warm-up included")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config = load_config(options.config).config
    source, step_rows = open_source(config.data.train), config.train.step.samples
    assert step_rows is not None, "the step is given in rows"
    rows = [source.row(index) for index in range(options.steps * step_rows)]
    processor, given = load_processor(config), arguments_of(config, options, options.out.parent)
    first = options.warmup * step_rows
    # Each trains a model of its own: what the first has wrapped around its model would stay there.
    warm = dataset(rows[first - step_rows : first])
    trainer_of(options, model_of(config, options.weights), processor, given, warm).train()
    trainer = trainer_of(options, model_of(config, options.weights), processor, given, dataset(rows[first:]))
    clock = Clock()
    trainer.add_callback(clock)
    loss = trainer.train().training_loss
    if trainer.is_world_process_zero():
        measured = len(rows) - first
        figures = {"rows": measured, "steps": trainer.state.global_step, "seconds": clock.seconds, "loss": loss}
        options.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
