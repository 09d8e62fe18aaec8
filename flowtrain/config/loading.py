"""From a YAML file and overrides to a frozen `Config`, or to every fault at once with its place (contract C14).

    file ──▶ document ──▶ + overrides ──▶ paths made absolute ──▶ schema ──▶ files there? ──▶ LoadedConfig
                 └────────────┴──────────────────┴───────────────────┴───────────┴──▶ issues ──▶ ConfigError (exit 2)

A line of the error reads `file:line:column: section.key: what is wrong; did you mean 'x'?`. Relative paths are relative
to the file, in an override to the current folder; what is only read may be at a URL.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from flowtrain import mirror
from flowtrain.config.document import Issue, KeyPath, Place, read_document
from flowtrain.config.issues import issues_of, known_place
from flowtrain.config.resolved import config_from_json, config_to_json, dump_resolved
from flowtrain.config.schema import Config
from flowtrain.config.suggest import section_of, walk
from flowtrain.config.units import ReadPath
from flowtrain.errors import ConfigError

__all__ = ["LoadedConfig", "config_from_json", "config_to_json", "dump_resolved", "load_config"]

EXCLUSIVE: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("train", "max_steps"), ("train", "epochs")),
    (("train", "warmup_steps"), ("train", "warmup_ratio")),
    (("train", "step", "samples"), ("train", "step", "packs")),
    (("producers", "num"), ("producers", "layout")),
    (("consumers", "num"), ("consumers", "layout")),
)
"""Pairs of which one may be given: an override of one drops the other that the file gives."""

READ: tuple[KeyPath, ...] = (("model", "path"), ("data", "train"), ("data", "eval"))
"""What a run reads: paths or URLs (`mirror`)."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid config, the file it came from, and where each key was set (`train.lr` ▶ `run.yaml:7:3`)."""

    config: Config
    path: Path
    origins: Mapping[str, str] = field(default_factory=dict)


def load_config(path: Path | str, overrides: Sequence[str] = (), check_files: bool = True) -> LoadedConfig:
    """Load and check a config; raises `ConfigError` with one line for each fault.

    `overrides`: `section.key=value`, the value read as YAML. `check_files`: model folder and data files must be there;
    those at URLs are fetched.

    >>> load_config("digits.yaml", ["train.lr=2e-5"]).config.train.lr
    2e-05
    """
    path = Path(path)
    document = read_document(_read_text(path), str(path))
    data, places, issues = document.data, document.places, document.issues
    if data is None and not issues:
        raise ConfigError(f"{path}: the config is empty; `model.path` and `data.train` at least are needed")
    if not isinstance(data, dict):
        wrong = Issue(Place(str(path), 1, 1), (), "expected a mapping such as `train: {lr: 1e-4}`")
        raise _error(issues or [wrong])
    given = _apply_overrides(data, overrides, places, issues)
    _fill_sections(Config, data)
    _absolute_paths(data, Path(os.path.abspath(path)).parent, given, places, issues)
    config: Config | None = None
    try:
        config = Config.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        issues += issues_of(error, data, places)
    if check_files:
        issues += _file_issues(data, places)
    if issues or config is None:
        raise _error(issues)
    return LoadedConfig(config, path, {".".join(key): str(place) for key, place in places.items() if key})


def _error(issues: Sequence[Issue]) -> ConfigError:
    ordered = sorted(issues, key=lambda issue: (issue.place, issue.key))
    return ConfigError("\n".join(dict.fromkeys(str(issue) for issue in ordered)))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean '{path.parent / close[0]}'?" if close else "; check the path"
        raise ConfigError(f"{path}: there is no such config file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _apply_overrides(
    data: dict[str, Any], overrides: Sequence[str], places: dict[KeyPath, Place], issues: list[Issue]
) -> set[KeyPath]:
    """Put each override into `data`; returns the key paths set by overrides."""
    given: set[KeyPath] = set()
    for text in overrides:
        place = Place(f"--set {text}")
        name, equals, value_text = text.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path):
            issues.append(Issue(place, (), "write an override as section.key=value, such as train.lr=2e-5"))
            continue
        document = read_document(value_text, str(place))
        if document.issues:
            issues.extend(Issue(place, path, issue.text) for issue in document.issues)
            continue
        _forget(places, path)
        for inner in document.places:
            places[(*path, *inner)] = place
        for length in range(1, len(path)):
            if path[:length] not in places or not isinstance(_get(data, path[:length]), dict):
                places[path[:length]] = place
        places[path] = place
        given.add(path)
        _put(data, path, document.data)
    for one, other in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
        if one in given and other not in given:
            _put(data, other, None, only_if_there=True)
    return given


def _put(data: dict[str, Any], path: KeyPath, value: Any, only_if_there: bool = False) -> None:
    """Set a value at a key path, making sections on the way; one that is no mapping is replaced."""
    for name in path[:-1]:
        if not isinstance(data.get(name), dict):
            if only_if_there:
                return
            data[name] = {}
        data = data[name]
    if not only_if_there or path[-1] in data:
        data[path[-1]] = value


def _forget(places: dict[KeyPath, Place], path: KeyPath) -> None:
    for key in [key for key in places if key[: len(path)] == path]:
        del places[key]


def _fill_sections(model: type[BaseModel], data: dict[str, Any]) -> None:
    """A section with all its keys left out (`train:`) is an empty one; a required one that is not there too."""
    for name, entry in model.model_fields.items():
        section = section_of(entry)
        if section is None:
            continue
        if data.get(name, {} if entry.is_required() else ...) in (None, {}):
            data[name] = {}
        if isinstance(data.get(name), dict):
            _fill_sections(section, data[name])


def _is_path(annotation: Any) -> bool:
    return annotation is Path or annotation in (Path | None, ReadPath | None, Literal["off", "auto"] | Path)


def _absolute_paths(
    data: dict[str, Any], folder: Path, given: set[KeyPath], places: dict[KeyPath, Place], issues: list[Issue]
) -> None:
    """Make every path absolute, defaults too: what a run does must not depend on where it is started."""
    for key, entry in walk(Config):
        if not _is_path(entry.annotation):
            continue
        value = _get(data, key)
        if value is None and isinstance(entry.default, Path):
            value = str(entry.default)
        if not isinstance(value, str) or (value in ("off", "auto") and entry.default == "off"):
            continue
        if not value.strip() or "\0" in value:
            issues.append(Issue(known_place(places, key), key, "a path must not be empty"))
            continue
        if mirror.is_url(value) and key in READ:
            continue
        if "://" in value:
            told = f"{mirror.bare(value)} is a URL, and what is written needs a file system that appends, renames and "
            issues.append(Issue(known_place(places, key), key, told + "locks: mount that storage on every node"))
            continue
        from_override = any(key[: len(path)] == path for path in given)
        base = Path.cwd() if from_override else folder
        _put(data, key, os.path.normpath(base / os.path.expanduser(value)))


def _get(data: Any, key: KeyPath) -> Any:
    for name in key:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _file_issues(data: dict[str, Any], places: dict[KeyPath, Place]) -> list[Issue]:
    """What the run will read must be there, before anything starts."""
    issues = []
    for key in READ:
        value = _get(data, key)
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            continue
        if what := _missing(value, needs_config=key == ("model", "path")):
            issues.append(Issue(known_place(places, key), key, what))
    return issues


def _missing(value: str, needs_config: bool) -> str | None:
    try:
        path = mirror.local_path(value) if mirror.is_url(value) else Path(value)
        mirror.fetch(path)
    except mirror.FetchError as error:
        return str(error)
    try:
        if not path.exists():
            names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, names, n=1)
            return f"{path} does not exist" + (f"; did you mean '{close[0]}'?" if close else "; check the path")
        if needs_config and not (path / "config.json").is_file():
            return f"{mirror.shown(path)} is no Hugging Face model folder: it has no config.json"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None
