"""A `Config` as text again: the resolved YAML of RUN_DIR/config.yaml, and JSON for other processes.

Both read back to an equal config: floats keep every bit, paths are absolute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from flowtrain.config.document import Dumper
from flowtrain.config.schema import Config


def dump_resolved(config: Config, comments: bool = False) -> str:
    """YAML with every key, defaults filled in; `comments`: what each key is for, beside it."""
    return "\n".join(_lines(config, "", comments)) + "\n"


def _lines(section: BaseModel, indent: str, comments: bool) -> Iterator[str]:
    plain: dict[str, Any] = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ", comments)
        else:
            line = f"{indent}{name}: {_flow(plain[name])}"
            yield f"{line:<44}  # {field.description}" if comments and field.description else line


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=2**20, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def config_to_json(config: Config) -> str:
    return config.model_dump_json()


def config_from_json(text: str) -> Config:
    return Config.model_validate_json(text, strict=True)
