"""Writes docs/configuration.md's tables from the config schema: `python scripts/config_reference.py`.

The page's text is kept; what stands between the two marker lines is made anew. A test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowtrain.config.schema import Config

PAGE = Path(__file__).resolve().parent.parent / "docs/configuration.md"
BEGIN = "<!-- made by scripts/config_reference.py: begin -->"
END = "<!-- end -->"
PLAIN_TYPES: dict[Any, str] = {
    bool: "`true` / `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    NoneType: "null",
}
MEBIBYTE = 2**20


def type_text(annotation: Any) -> str:
    """How a type reads to someone who writes YAML."""
    if annotation in PLAIN_TYPES:
        return PLAIN_TYPES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin is dict:
        return f"map from {type_text(arguments[0])} to {type_text(arguments[1])}"
    if origin in (tuple, list):
        entries = [type_text(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {entries[0]}" if len(set(entries)) == 1 else f"list: {', '.join(entries)}"
    raise TypeError(f"a config key has the type {annotation!r}: say in scripts/config_reference.py how it reads")


def default_text(key: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if key.endswith("bytes") and default % MEBIBYTE == 0:
        return f"{default // MEBIBYTE}MiB"
    if isinstance(default, tuple):
        return "[" + ", ".join(str(entry) for entry in default) + "]"
    return str(default)


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def row_of(key: str, field: FieldInfo) -> str:
    cells = (f"`{key}`", type_text(field.annotation), default_text(key, field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rows_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}"
        inner = nested_model(field)
        if inner is None:
            yield row_of(key, field)
        else:
            yield from rows_of(inner, key)


def reference() -> str:
    """One table a section, in the order of the schema."""
    parts = []
    for name, field in Config.model_fields.items():
        model = nested_model(field)
        rows = [row_of(name, field)] if model is None else list(rows_of(model, name))
        parts.append("\n".join([f"### {name}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def page_with_reference(page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(page_with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
