"""Makes the model folder of an example job, offline: `python examples/make_model.py digits|emoji [OUT]`.

The folder is an ordinary Hugging Face one of the Qwen3-VL kind, small enough for a laptop CPU: config, tokenizer
(byte-level BPE trained on the example's own rows), image and video processor, chat template. It holds no weights: a run
with `model.init: random` draws them from its seed. The same input gives the same files.

    rows ──▶ tokenizer ─┬─▶ processor (patches of 8 pixels, 2 × 2 patches a visual token)
                        └─▶ config (vocabulary size, ids of the image tokens)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

EXAMPLES = Path(__file__).resolve().parent
PAD = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH_PIXELS = 8
MERGE_PATCHES = 2
HEAD_WIDTH = 32
ROPE_SECTIONS = (6, 5, 5)  # frequencies for time, height and width: half a head in all

# `generation` marks what the assistant says, its end token included: exactly the tokens that are trained.
CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- parts(message.content) -}}{{- '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- parts(message.content) -}}{{- '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Size:
    """What differs between the examples. Widths are multiples of `HEAD_WIDTH`."""

    rows: Path
    vocabulary: int
    text_width: int
    text_layers: int
    vision_width: int
    vision_layers: int
    max_pixels: int
    vision_mlp: int | None = None  # width of the vision tower's MLPs, three times its own where nothing is said


SIZES = {
    "digits": Size(EXAMPLES / "digits/data/train.parquet", 320, 128, 3, 96, 3, 64 * 64),
    "emoji": Size(EXAMPLES / "emoji/data/train.jsonl", 2048, 128, 4, 96, 3, 256 * 256),
}


def texts(rows: Path) -> Iterator[str]:
    """What users and assistants say in `rows`, without image placeholders."""
    if rows.suffix == ".parquet":
        conversations = pq.read_table(rows, columns=["messages"])["messages"].to_pylist()
    else:
        conversations = [json.loads(line)["messages"] for line in rows.read_text(encoding="utf-8").splitlines()]
    for messages in conversations:
        for message in messages:
            yield message["content"].replace("<image>", "")


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system", "user", "assistant"] * 100
    tokenizer.train_from_iterator([*texts(size.rows), *roles], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )


def make_config(size: Size, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    text_heads = size.text_width // HEAD_WIDTH
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=True,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        text_config={
            "hidden_size": size.text_width,
            "intermediate_size": 3 * size.text_width,
            "num_hidden_layers": size.text_layers,
            "num_attention_heads": text_heads,
            "num_key_value_heads": text_heads // 2,
            "head_dim": HEAD_WIDTH,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": list(ROPE_SECTIONS),
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token_id(END_OF_TURN),
            "pad_token_id": token_id(PAD),
        },
        vision_config={
            "depth": size.vision_layers,
            "hidden_size": size.vision_width,
            "intermediate_size": size.vision_mlp or 3 * size.vision_width,
            "num_heads": size.vision_width // HEAD_WIDTH,
            "out_hidden_size": size.text_width,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGE_PATCHES,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 256,
        },
    )


def make_processor(size: Size, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    patches = {"patch_size": PATCH_PIXELS, "merge_size": MERGE_PATCHES, "temporal_patch_size": 2}
    pixels = {"shortest_edge": (PATCH_PIXELS * MERGE_PATCHES) ** 2, "longest_edge": size.max_pixels}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, image_mean=[0.5] * 3, image_std=[0.5] * 3, **patches),
        video_processor=Qwen3VLVideoProcessor(size=pixels, **patches),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(size: Size, out: Path) -> None:
    """Writes a model folder of this size to `out`."""
    tokenizer = make_tokenizer(size)
    make_config(size, tokenizer).save_pretrained(out)
    make_processor(size, tokenizer).save_pretrained(out)
    ends = tokenizer.convert_tokens_to_ids([END_OF_TURN, PAD])
    GenerationConfig(eos_token_id=ends[0], pad_token_id=ends[1], do_sample=False).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model folder of an example job.")
    parser.add_argument("name", choices=sorted(SIZES))
    parser.add_argument("out", type=Path, nargs="?", help="default: examples/NAME/model")
    arguments = parser.parse_args()
    out = arguments.out or EXAMPLES / arguments.name / "model"
    make_model(SIZES[arguments.name], out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
