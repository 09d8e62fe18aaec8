"""One side's training state on disk, as pieces: safetensors and JSON only, so that loading never runs code.

    FOLDER/parameters-R.safetensors   what rank R holds of each parameter, frozen ones too, by its whole-model name
    FOLDER/optimizer-R.safetensors    the same of exp_avg/NAME, exp_avg_sq/NAME, step/NAME of each one updated
    FOLDER/updater.json               step, freeze set, names of the trainable parameters

A file's header says where in the whole each piece lies. Each piece is written once, by the first who holds it; a rank
that goes on reads what overlaps with its own pieces, whatever the layout was, and from either side's folder: with
another freeze set the projector may train on the other side.

Invariants: a file appears whole (written aside, synced, renamed); a state with a number that is not finite is not
written (K17); loading checks every name, shape and dtype and changes nothing before all of it fits (K11, K13).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flowtrain.errors import ConfigError, FlowTrainError
from flowtrain.models.table import module_of_name
from flowtrain.models.weights import write_json, write_tensors
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.pieces import Box, Region, local_tensor

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
STATE_FILE = "updater.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
PIECES_KEY = "pieces"
DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor: `region` of one of `shape`."""

    tensor: torch.Tensor
    region: Region
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What `updater.json` holds: number of updates made, freeze set and trainable names."""

    step: int
    freeze: tuple[str, ...]
    trainable: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "freeze": list(self.freeze), "trainable": list(self.trainable)}


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    key: str
    region: Region
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def pieces_of(name: str, tensor: torch.Tensor, parameter: torch.Tensor, holding: Holding) -> list[Piece]:
    """A rank's tensor as the pieces that it is where it lies beside this parameter.

    A number (AdamW's step) is whole, and goes with the beginning of its parameter.
    """
    boxes, shape = holding.boxes(name, parameter), tuple(holding.shape(name, parameter))
    if tensor.dim() == 0:
        return [Piece(tensor, Region((), ()), ())] if any(not any(box.whole.offset) for box in boxes) else []
    return [Piece(tensor[box.own.slices], box.whole, shape) for box in boxes]


def save_parameters(folder: Path, parameters: Mapping[str, nn.Parameter], holding: Holding, step: int) -> None:
    """Write what this rank is the first to hold of a side's parameters."""
    pieces = {
        name: pieces_of(name, local_tensor(parameter.detach()), parameter, holding)
        for name, parameter in parameters.items()
        if holding.counts(name, parameter)
    }
    for name, of_name in pieces.items():
        if not all(bool(torch.isfinite(piece.tensor).all()) for piece in of_name):
            raise FlowTrainError(
                f"{name} holds numbers that are not finite after step {step}: no checkpoint is written; "
                f"resume from an older one with a lower train.lr"
            )
    write_pieces(folder, PARAMETERS, holding.groups.rank, pieces)


def load_parameters(folders: Sequence[Path], parameters: Mapping[str, nn.Parameter], holding: Holding) -> None:
    """Fill what this rank holds of a side's parameters from a checkpoint, whichever side has written them.

    A module of which nothing is there did not train: it stays what the model's weights say.

    Raises:
        ConfigError: the names, shapes or dtypes are not this model's; nothing is changed then.
    """
    stored = Pieces(folders, PARAMETERS)
    held = {module_of_name(name) for name in stored.names}
    of_side = holding.names(parameters)
    here = {module_of_name(name) for name in of_side}
    expected = {name for name in of_side if module_of_name(name) in held}
    wanted = {name: p for name, p in parameters.items() if name in expected}
    there = {name for name in stored.names if module_of_name(name) in here | {None}}
    if there != expected:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: parameter names differ from the model's "
            f"({_difference(there, expected)}): resume with the model.path that the run began with"
        )
    for name, parameter in wanted.items():
        stored.check(name, holding.shape(name, parameter), parameter.dtype)
    for name, parameter in wanted.items():
        stored.read_into(name, local_tensor(parameter.detach()), holding.boxes(name, parameter))


def _difference(stored: Set[str], wanted: Set[str]) -> str:
    """The first names that only one of the two has."""
    only_stored, only_wanted = sorted(stored - wanted), sorted(wanted - stored)
    parts = [f"only there: {', '.join(only_stored[:3])}"] if only_stored else []
    parts += [f"only here: {', '.join(only_wanted[:3])}"] if only_wanted else []
    return "; ".join(parts)


def write_pieces(folder: Path, kind: str, rank: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Write one rank's pieces; nothing where it has none. A tensor's first piece has its name, others `NAME@1` …"""
    places: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, of_name in pieces.items():
        for number, piece in enumerate(of_name):
            key = f"{name}@{number}" if number else name
            places[key] = {"name": name, "offset": piece.region.offset, "shape": piece.shape}
            tensors[key] = piece.tensor
    if tensors:
        write_tensors(tensors, folder / f"{kind}-{rank}.safetensors", {PIECES_KEY: json.dumps(places)})


def write_state(folder: Path, state: SavedState) -> None:
    write_json(state.to_json(), folder / STATE_FILE)


class Pieces:
    """The pieces of one kind in the folders of a checkpoint; nothing is read but headers before it is asked for."""

    def __init__(self, folders: Iterable[Path], kind: str) -> None:
        self.folders = tuple(folders)
        self._stored: dict[str, list[_Stored]] = {}
        for folder in self.folders:
            for path in sorted(folder.glob(f"{kind}-*.safetensors")):
                self._index(path)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    @property
    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """ConfigError unless the tensor is there, whole, and as this run has it."""
        stored = self._stored.get(name)
        if stored is None:
            raise ConfigError(f"{self.folders[0].parent}: {name} is missing: resume from another checkpoint")
        there = (list(stored[0].shape), stored[0].dtype)
        if there != (list(shape), dtype):
            raise ConfigError(
                f"{stored[0].path}: {name} is {there[0]} {there[1]} there and {list(shape)} {dtype} in this run: "
                f"resume with the model.path and model.dtype that the run began with"
            )
        held = sum(prod(piece.region.shape) for piece in stored)
        if held != prod(shape):
            raise ConfigError(
                f"{stored[0].path.parent}: {held} of the {prod(shape)} numbers of {name} are there: a file of another "
                f"rank is missing or was added; resume from another checkpoint"
            )

    def read_into(self, name: str, target: torch.Tensor, boxes: Sequence[Box]) -> None:
        """Fill these boxes of `target`, which is what a rank holds."""
        for stored, box in product(self._stored[name], boxes):
            common = box.whole.overlap(stored.region)
            if not common.is_empty:
                with _opened(stored.path) as file:
                    part = file.get_slice(stored.key)[common.within(stored.region).slices]
                target[box.own.slices][common.within(box.whole).slices].copy_(part)

    def _index(self, path: Path) -> None:
        with _opened(path) as file:
            try:
                places = json.loads((file.metadata() or {})[PIECES_KEY])
                for key in file.keys():  # noqa: SIM118  # no mapping
                    there, place = file.get_slice(key), places[key]
                    region = Region(tuple(place["offset"]), tuple(there.get_shape()))
                    stored = _Stored(path, key, region, tuple(place["shape"]), DTYPES.get(there.get_dtype()))
                    self._stored.setdefault(place["name"], []).append(stored)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read ({error}): resume from another checkpoint") from error


def read_state(folders: Sequence[Path]) -> SavedState:
    """What the folders of a checkpoint say together: all names that trained on either side."""
    found = [_read_state(folder / STATE_FILE) for folder in folders if (folder / STATE_FILE).is_file()]
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no state of a side is there: resume from another checkpoint"
        )
    step = max(state.step for state in found)
    return SavedState(step, found[0].freeze, tuple(name for state in found for name in state.trainable))


def _read_state(path: Path) -> SavedState:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return SavedState(int(content["step"]), tuple(content["freeze"]), tuple(content["trainable"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): resume from another checkpoint") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): resume from another checkpoint") from error
