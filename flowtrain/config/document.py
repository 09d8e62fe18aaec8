"""Reads YAML text into plain data and remembers where each key stands (contract C14).

    text ──compose──▶ node tree ──▶ data: dict, list, scalars     places: ("train", "lr") ▶ Place(file, line, column)

Scalars follow the core schema of YAML 1.2, not 1.1: `1e-5` is a number, `yes` and `off` are text. Every key becomes
text. A fault of the text as a whole ends reading; faults of single keys (twice, a tag, no plain key) are collected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str, ...]

MAX_NODES = 20_000
"""A config has some dozens; anchors that multiply must not fill the memory."""

_CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
_TAG = "tag:yaml.org,2002:"


def _resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    """In PyYAML's form: by first character, None standing for any."""
    return {None: [(_TAG + kind, re.compile(rf"^(?:{pattern.pattern})$")) for kind, pattern in _CORE.items()]}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; `yaml_implicit_resolvers` decides what a plain scalar is."""

    yaml_implicit_resolvers = _resolvers()


class Dumper(yaml.SafeDumper):
    """Quotes every text that `read_document`, or a reader of YAML 1.1, would take for something else."""

    yaml_implicit_resolvers = yaml.SafeDumper.yaml_implicit_resolvers | _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Always in full: an anchor in a config helps nobody."""
        return True


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a key or text stands, as an editor opens it: `file:line:column`, or the override it came with."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong: `place: key.path: text`."""

    place: Place
    key: KeyPath
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), ".".join(self.key), self.text) if part)


@dataclass(slots=True)
class Document:
    """Data of a YAML text. `data` is None when there is nothing in it or when it cannot be read at all."""

    data: Any = None
    places: dict[KeyPath, Place] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)


def read_document(text: str, name: str) -> Document:
    """Parse `text`; `name` stands for the file in places. Raises nothing: faults are in `issues`."""
    document = Document()
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.data = _Reader(document, name).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        document.issues.append(Issue(place, (), f"this is not YAML: {what}{_yaml_hint(error)}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        what = f"the character U+{int(error.character):04X} is not allowed"
        document.issues.append(Issue(Place(name, line, column), (), f"this is not YAML: {what}; remove it"))
    except RecursionError:
        document.issues.append(Issue(Place(name), (), "the nesting is too deep: a config has three levels"))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _yaml_hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "; indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "; check the indentation, or put quotes around a text with a colon"
    if "expected ',' or" in problem or "did not find expected" in problem:
        return "; a bracket, brace or quote is not closed"
    if "another document" in problem:
        return "; a config is one document, without `---` in the middle"
    return ""


class _Reader:
    """Turns nodes into data, noting places and issues."""

    def __init__(self, document: Document, name: str) -> None:
        self.document = document
        self.name = name
        self._open: set[int] = set()
        self._num_nodes = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        place = self._place(node)
        self.document.places.setdefault(path, place)
        self._num_nodes += 1
        if id(node) in self._open or self._num_nodes > MAX_NODES:
            self._issue(place, path, "an alias contains itself or repeats too much; write the value out")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._issue(place, path, f"the tag {node.tag} is not supported; remove it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return dict(self._entries(node, path))
            return [self.value(entry, (*path, str(index))) for index, entry in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        seen: dict[str, Place] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._issue(place, path, "a key must be plain text")
                continue
            key = str(key_node.value)
            if key in seen:
                first = seen[key]
                self._issue(place, (*path, key), f"this key stands twice, first in line {first.line}; keep one of them")
                continue
            seen[key] = place
            self.document.places[(*path, key)] = place
            yield key, self.value(value_node, (*path, key))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        pattern = _CORE.get(kind)
        if pattern is None or pattern.fullmatch(text) is None:
            what = f"the tag {node.tag} is not supported" if pattern is None else f"{text!r} is no {kind}"
            self._issue(self._place(node), path, f"{what}; remove the tag")
            return None
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return _number(text)
        return None if kind == "null" else text.lower() == "true"

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def _issue(self, place: Place, path: KeyPath, text: str) -> None:
        self.document.issues.append(Issue(place, path, text))


def _number(text: str) -> int | float:
    """A float, but `1e3` may stand where a whole number is asked for."""
    if text.lower().endswith(("inf", "nan")):
        return float(text.replace(".", ""))
    value = float(text)
    return int(value) if "." not in text and value.is_integer() and abs(value) < 2**53 else value
