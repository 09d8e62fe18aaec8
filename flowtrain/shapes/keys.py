"""Sections of a `config.json`, with the values that a configuration class fills in where a key is absent.

A key that is there and null is not absent: many classes take null to mean "none".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError


class Keys:
    """One section; a missing or ill-typed key is told with file and key path."""

    def __init__(self, file: Path, path: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.file = file
        self.path = path
        self.values = values
        self.defaults = defaults

    @classmethod
    def of_file(cls, file: Path) -> Keys:
        """The whole file.

        Raises:
            ConfigError: it cannot be read, is not JSON, or holds no mapping.
        """
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot read {file}: {error.strerror}; set model.path to a Hugging Face folder"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON: {error}; fix it or set model.path to another folder") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{file} holds no mapping at its top level: set model.path to a Hugging Face folder")
        return cls(file, "", values, {})

    def find(self, *names: str) -> Keys | None:
        """The first of these sections that is there; null is as good as absent."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, dict):
                return Keys(self.file, f"{self.path}{name}.", value, {})
            if value is not None:
                raise ConfigError(f"{self.file}: `{self.path}{name}` is {value!r}: expected a mapping")
        return None

    def section(self, *names: str) -> Keys:
        if (found := self.find(*names)) is None:
            raise ConfigError(
                f"{self.file} has no section `{self.path}{names[0]}`: "
                "model.path must be the folder of a vision-language model"
            )
        return found

    def absent(self, name: str, values: Mapping[str, Any]) -> Keys:
        """A section that the file leaves out, as its class fills it in."""
        return Keys(self.file, f"{self.path}{name}.", values, {})

    def over(self, defaults: Mapping[str, Any]) -> Keys:
        """The same section, these values standing for absent keys."""
        return Keys(self.file, self.path, self.values, {**self.defaults, **defaults})

    def get(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.defaults.get(name)

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of these names that is there; `default` where none is, or null."""
        for name in sorted(names, key=lambda name: name not in self.values):
            value = self.get(name)
            if isinstance(value, (list, tuple)) and value and all(side == value[0] for side in value):
                value = value[0]
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{self.file}: `{self.path}{name}` is {value!r}: expected a positive whole number")
            return value
        if default is None:
            raise ConfigError(f"{self.file} has no `{self.path}{names[0]}`: add it, from the model's own config")
        return default

    def ratio(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{self.file}: `{self.path}{name}` is {value!r}: expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def indexes(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of whole numbers from 0."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in value
        ):
            raise ConfigError(f"{self.file}: `{self.path}{name}` is {value!r}: expected a list of whole numbers")
        return tuple(value)

    def word(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def says(self, rule: str | bool) -> bool:
        """A rule of a table of kinds: fixed, or the name of the key that decides."""
        return rule if isinstance(rule, bool) else self.flag(rule)
