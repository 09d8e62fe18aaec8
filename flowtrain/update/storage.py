"""One side's training state on disk: safetensors and JSON only, so that loading never runs code.

    FOLDER/parameters.safetensors   every parameter of the side, frozen ones too, by its whole-model name
    FOLDER/optimizer.safetensors    exp_avg/NAME, exp_avg_sq/NAME, step/NAME for each parameter ever updated
    FOLDER/updater.json             step, freeze set, names of the trainable parameters

Invariants: the folder appears whole (written aside, synced, renamed); a state with a number that is not finite is not
written (K17); loading checks every name, shape and dtype and changes nothing before all of it fits (K11, K13).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from flowtrain.errors import ConfigError, FlowTrainError, PlanError
from flowtrain.models.weights import write_tensors
from flowtrain.parallel.holding import Holding
from flowtrain.telemetry.files import sync, write_atomic

PARAMETERS_FILE = "parameters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "updater.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class SavedState:
    """What `updater.json` holds: number of updates made, freeze set and trainable names."""

    step: int
    freeze: tuple[str, ...]
    trainable: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps({"step": self.step, "freeze": list(self.freeze), "trainable": list(self.trainable)}, indent=1)


def save_side(
    folder: Path, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], state: SavedState
) -> None:
    """Write the whole state of one side to `folder`, replacing what is there; `moments`: by MOMENT/NAME."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter).all()):
            raise FlowTrainError(
                f"{name} holds numbers that are not finite after step {state.step}: no checkpoint is written; "
                f"resume from an older one with a lower train.lr"
            )
    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    write_tensors(parameters, aside / PARAMETERS_FILE)
    write_tensors(moments, aside / OPTIMIZER_FILE)
    try:
        write_atomic(aside / STATE_FILE, state.to_json())
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise PlanError(f"cannot write {folder}: {error.strerror}; free disk space or change run.dir") from error


def load_side(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    own: Mapping[str, nn.Parameter],
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    freeze: tuple[str, ...],
    trainable: tuple[str, ...],
) -> SavedState:
    """Put the state in `folder` into what this rank holds of `parameters`, and into `optimizer`.

    `own`: the pieces that the optimizer works on; `holding`: how these lie in the whole.

    Raises:
        ConfigError: the state belongs to another run.
    """
    state = _read_state(folder)
    if set(state.freeze) != set(freeze):
        raise ConfigError(
            f"{folder}: train.freeze was [{', '.join(state.freeze)}] when this checkpoint was saved and is "
            f"[{', '.join(freeze)}] now: set it back, or start a new run from the export"
        )
    if state.trainable != trainable:
        raise ConfigError(
            f"{folder}: the trainable parameters differ ({_difference(state.trainable, trainable)}): "
            f"resume with the model.path that the run began with"
        )
    stored = _read_tensors(folder / PARAMETERS_FILE)
    whole = {
        name: torch.empty(holding.shape(name, parameter), dtype=parameter.dtype, device="meta")
        for name, parameter in parameters.items()
    }
    _check(folder / PARAMETERS_FILE, stored, whole)
    moments = _moments(folder / OPTIMIZER_FILE, {name: whole[name] for name in trainable})
    with torch.no_grad():
        for name, parameter in parameters.items():
            own[name].copy_(holding.piece(name, stored[name], parameter))
    optimizer.state.clear()
    for name, of_name in moments.items():
        parameter = parameters[name]
        optimizer.state[own[name]] = {
            moment: holding.piece(name, tensor, parameter).to(parameter.device, copy=True)
            for moment, tensor in of_name.items()
        }
    return state


def _read_state(folder: Path) -> SavedState:
    path = folder / STATE_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return SavedState(int(content["step"]), tuple(content["freeze"]), tuple(content["trainable"]))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is missing: this side did not train when the checkpoint was saved; set train.freeze back"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): resume from another checkpoint") from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): resume from another checkpoint") from error


def _check(path: Path, stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Every name, shape and dtype as this run has it."""
    if stored.keys() != wanted.keys():
        raise ConfigError(
            f"{path}: parameter names differ from the model's ({_difference(stored, wanted)}): "
            f"resume with the model.path that the run began with"
        )
    for name, tensor in wanted.items():
        there = (tuple(stored[name].shape), stored[name].dtype)
        if there != (tuple(tensor.shape), tensor.dtype):
            raise ConfigError(
                f"{path}: {name} is {list(there[0])} {there[1]} there and {list(tensor.shape)} {tensor.dtype} in this "
                f"run: resume with the model.path and model.dtype that the run began with"
            )


def _moments(path: Path, trainable: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Optimizer state by parameter name, checked; a parameter that was never updated has none."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _read_tensors(path).items():
        moment, _, name = key.partition("/")
        by_name.setdefault(name, {})[moment] = tensor
    for name, of_name in by_name.items():
        if name not in trainable or of_name.keys() != set(MOMENTS):
            raise ConfigError(f"{path}: {name} has {sorted(of_name)}, which is no state of a parameter of this run")
        for moment in MOMENTS[:2]:
            _check(path, {name: of_name[moment]}, {name: trainable[name]})
    return by_name


def _difference(stored: Any, wanted: Any) -> str:
    """The first names that only one of the two has."""
    only_stored, only_wanted = sorted(set(stored) - set(wanted)), sorted(set(wanted) - set(stored))
    parts = [f"only there: {', '.join(only_stored[:3])}"] if only_stored else []
    parts += [f"only here: {', '.join(only_wanted[:3])}"] if only_wanted else []
    return "; ".join(parts) or "another order"
