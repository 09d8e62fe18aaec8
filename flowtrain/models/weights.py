"""Tensors on disk: safetensors files read by name and written whole.

A folder holds either `model.safetensors`, or shards named by `model.safetensors.index.json`. Reading takes single
tensors out of a memory-mapped file, so that a half touches only its own bytes. Writing goes to a name aside and is
renamed when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.files import sync, write_atomic


class StoredTensor(Protocol):
    """A tensor in a file; slices of it are read alone."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """The name that safetensors has for it, such as `BF16`."""

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor: ...


SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    return (folder / SINGLE_NAME).is_file() or (folder / INDEX_NAME).is_file()


def weight_files(folder: Path) -> dict[str, Path]:
    """Name of every tensor in the folder → the file that holds it.

    Raises:
        ConfigError: no weights, an index that cannot be read, or a shard that is missing or damaged.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(shard) for shard in shards.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: not a weight index ({error}); fetch the model folder again") from error
        for shard in sorted(names):
            if Path(shard).name != shard:
                raise ConfigError(
                    f"{index}: shard {shard!r} is not the name of a file beside it; fetch the folder again"
                )
            if not (folder / shard).is_file():
                raise ConfigError(f"{index}: shard {shard} is missing beside it; fetch the model folder again")
        return {name: folder / shard for name, shard in shards.items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ConfigError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}; set model.init: random, or add the weights")
    return dict.fromkeys(tensor_names(single), single)


def tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, file by file, each a CPU tensor in its stored dtype."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, wanted in by_file.items():
        with _open(path) as file:
            for name in wanted:
                yield name, file.get_tensor(name)


def open_tensors(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, StoredTensor]]:
    """The named tensors, file by file, of which nothing is read before it is asked for."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, wanted in by_file.items():
        with _open(path) as file:
            for name in wanted:
                yield name, file.get_slice(name)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, whole or not at all, `notes` in its header; `PlanError` when the disk refuses."""
    aside = path.with_name(f"{path.name}.tmp")
    with _disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_host, aside, metadata={"format": "pt", **(notes or {})})
        sync(aside)
        aside.replace(path)
        sync(path.parent)


def write_json(value: object, path: Path) -> None:
    """The same for JSON."""
    with _disk(path):
        write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PlanError(f"cannot write {path}: {error}; free disk space or change run.dir") from error


def _open(path: Path):  # type: ignore[no-untyped-def]  # safetensors ships no types
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); fetch the model folder again") from error
