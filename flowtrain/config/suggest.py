"""Did-you-mean: what a key or value that is not known may have been meant to be.

Tried in this order: the same name in another section (misplaced), a name that other trainers use, a close name in the
same section, a close name that other trainers use, a close name anywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowtrain.config.document import KeyPath

OTHER_NAMES = {
    "accumulation_steps": "train.step",
    "attn_implementation": "model.attention",
    "batch_size": "train.step",
    "bf16": "model.dtype",
    "cutoff_len": "data.max_seq_len",
    "dataset": "data.train",
    "eval_dataset": "data.eval",
    "eval_steps": "train.eval_every",
    "fp16": "model.dtype",
    "global_batch_size": "train.step",
    "gradient_accumulation_steps": "train.step",
    "learning_rate": "train.lr",
    "log_dir": "run.dir",
    "logging_dir": "run.dir",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip_norm",
    "max_length": "data.max_seq_len",
    "max_seq_length": "data.max_seq_len",
    "micro_batch_size": "packing.max_tokens",
    "model_name_or_path": "model.path",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "num_workers": "data.readers",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.step",
    "precision": "model.dtype",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "torch_dtype": "model.dtype",
    "warmup": "train.warmup_steps",
}
"""What other trainers call it, and the key here."""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that holds a section, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def walk(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of the schema, sections before their keys."""
    for name, field in model.model_fields.items():
        yield (*path, name), field
        section = section_of(field)
        if section is not None:
            yield from walk(section, (*path, name))


@cache
def known_keys(model: type[BaseModel]) -> tuple[KeyPath, ...]:
    return tuple(path for path, _ in walk(model))


def field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The field at a key path, None where the schema has no such key (also below a map)."""
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for name in path:
        if section is None or name not in section.model_fields:
            return None
        field = section.model_fields[name]
        section = section_of(field)
    return field


def suggest_key(model: type[BaseModel], path: KeyPath) -> str:
    """A hint for the unknown key at `path`, empty when nothing is near.

    >>> suggest_key(Config, ("train", "learning_rate"))
    "; did you mean 'train.lr'?"
    """
    keys = known_keys(model)
    name, parent = path[-1], path[:-1]
    if ":" in name:
        return "; write a space after the colon"
    same = [key for key in keys if key[-1] == name and key[:-1] != parent]
    if same:
        places = " or ".join(f"'{'.'.join(key)}'" for key in same[:3])
        return f"; it does not belong here, did you mean {places}?"
    plain = name.lower().replace("-", "_")
    if plain in OTHER_NAMES:
        return f"; did you mean '{OTHER_NAMES[plain]}'?"
    siblings = [key[-1] for key in keys if key[:-1] == parent]
    if close := difflib.get_close_matches(plain, siblings, n=1, cutoff=0.6):
        return f"; did you mean '{close[0]}'?"
    if close := difflib.get_close_matches(plain, OTHER_NAMES, n=1, cutoff=0.85):
        return f"; did you mean '{OTHER_NAMES[close[0]]}'?"
    by_name = {key[-1]: key for key in reversed(keys)}
    if close := difflib.get_close_matches(plain, by_name, n=1, cutoff=0.75):
        return f"; did you mean '{'.'.join(by_name[close[0]])}'?"
    return f"; known here: {', '.join(sorted(siblings))}" if siblings else ""


def suggest_value(value: object, choices: list[str]) -> str:
    """A hint for a value that is none of `choices`, empty when nothing is near."""
    close = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
