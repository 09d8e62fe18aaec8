"""Says what the schema found wrong in words of the config's author, at the place where it stands in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from flowtrain.config.document import Issue, KeyPath, Place
from flowtrain.config.schema import Config
from flowtrain.config.suggest import field_at, suggest_key, suggest_value

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list such as [a, b]",
    "model_type": "a mapping of keys",
    "path_type": "a path",
    "string_type": "a text",
    "tuple_type": "a list such as [a, b]",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def known_place(places: Mapping[KeyPath, Place], key: KeyPath) -> Place:
    """Where the key stands, or else the innermost section around it."""
    for length in range(len(key), -1, -1):
        if key[:length] in places:
            return places[key[:length]]
    return Place("config")


def issues_of(error: ValidationError, data: Any, places: Mapping[KeyPath, Place]) -> list[Issue]:
    """One issue for each thing that pydantic reports; `data` is what was checked."""
    issues = []
    for detail in error.errors(include_url=False):
        key = tuple(str(part) for part in detail["loc"] if part != "[key]")
        text = _text(detail, key)
        if detail["type"] == "value_error":
            key = _blamed(key, text, places)
        issues.append(Issue(known_place(places, key), key, text))
    return issues


def _blamed(section: KeyPath, text: str, places: Mapping[KeyPath, Place]) -> KeyPath:
    """A cross-check names keys in backticks: the first one that is set is where to look."""
    for name in re.findall(r"`([\w.]+)`", text):
        key = (*section, *name.split("."))
        if key in places:
            return key
    return section


def _text(detail: ErrorDetails, key: KeyPath) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{suggest_key(Config, key)}"
    if kind == "missing" and key[-1].isdecimal():
        return f"entry {int(key[-1]) + 1} of the list is missing"
    if kind == "missing":
        field = field_at(Config, key)
        return f"this key is missing: {field.description if field and field.description else 'it is required'}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{show(value)} is not one of {', '.join(choices)}{suggest_value(value, choices)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]}, found {show(value)}"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_long":
        return f"expected {context['max_length']} entries, found {context['actual_length']}"
    if kind in _EXPECTED:
        hint = suggest_value(value, ["true", "false"]) if kind == "bool_type" else ""
        if kind == "bool_type" and str(value).lower() in ("yes", "on", "no", "off"):
            hint = f"; did you mean '{str(str(value).lower() in ('yes', 'on')).lower()}'?"
        return f"expected {_EXPECTED[kind]}, found {show(value)}{hint}"
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {show(value)}"


def show(value: object) -> str:
    """A value as the author of a YAML file knows it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else str(value)
