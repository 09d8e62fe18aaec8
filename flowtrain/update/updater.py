"""The end of a step on one side of the cut: sum the gradients over its ranks, then scale, clip and step.

    gradients of the sum of losses ─reduce─▶ summed over ranks, Σg² per module ──▶ controller
                                                                                       │
    parameters ◀─ AdamW ◀─ × clip ◀─ (dump for verify) ◀─ × scale ◀─ update ◀── UpdateOrder

A rank holds each parameter whole, or a piece of it (`flowtrain.parallel.pieces`). AdamW works on what the rank holds:
it goes number by number, so pieces give what the whole would. Σg² counts every piece once, whoever holds copies of it.

Invariants: after `reduce` all ranks that hold the same piece hold the same gradient, bit for bit; a parameter that no
rank reached has grad None and is left alone (C2); after `update` no parameter has a gradient; only trainable parameters
are ever changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowtrain.config.schema import TrainConfig
from flowtrain.messages import UpdateOrder
from flowtrain.models.weights import write_tensors
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.mesh import AXES, SUMMED_AXES
from flowtrain.parallel.pieces import Axes, Box, local_tensor, own_piece, split_axes
from flowtrain.parallel.tensor import complete_gradients
from flowtrain.types import Module, Role
from flowtrain.update.collectives import Collectives
from flowtrain.update.optimizer import make_optimizer
from flowtrain.update.storage import (
    MOMENTS,
    OPTIMIZER,
    Piece,
    Pieces,
    SavedState,
    load_parameters,
    pieces_of,
    read_state,
    save_parameters,
    write_pieces,
    write_state,
)

TIMEOUT_SECONDS = 600.0

PIECE = 65_536
"""Numbers of which a wider copy stays in a core's cache."""


class Updater:
    """Owns the optimizer of one side on one rank.

    Args:
        parameters: those of the side that are here, by whole-model name, in the model's order on every rank.
        module_of: the module of each of the side.
        holding: what lies here of each, or the groups of ranks that hold all alike.
        faults: faults planted on purpose (`debug.faults`); those of the update are handled here.
        timeout_seconds: longest wait for one collective.
        trainable: names of all that train on the side; those of `parameters`, where nothing is said.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        module_of: Mapping[str, Module],
        train: TrainConfig,
        holding: Holding | Groups,
        faults: frozenset[str] = frozenset(),
        role: Role = Role.CONSUMER,
        timeout_seconds: float = TIMEOUT_SECONDS,
        trainable: Sequence[str] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.module_of = dict(module_of)
        self.train = train
        self.faults = faults
        self.role = role
        self.step = 0
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self._own = {name: own_piece(parameter) for name, parameter in self.parameters.items()}
        self.optimizer = make_optimizer(self._own, self.module_of, train)
        self._names = list(self.trainable) if trainable is None else list(trainable)
        self.timeout_seconds = timeout_seconds
        self.holding = Holding(holding) if isinstance(holding, Groups) else holding
        self.regroup(self.holding.groups)

    def regroup(self, groups: Groups) -> None:
        """Sum over the ranks of another side's groups from here on."""
        self.groups = groups
        self.holding = replace(self.holding, groups=groups)
        self._side = self._collectives(groups.over(AXES))
        due = sorted({self._due(name) for name in self.trainable if name not in self.holding.experts.cuts})
        self._sums = {axes: self._collectives(groups.over(axes)) for axes in due}
        self._expert_sum = self._collectives(groups.expert_copies)

    def _collectives(self, group: Any) -> Collectives:
        return Collectives(group, f"{self.role} {self.groups.rank}", self.timeout_seconds)

    def _due(self, name: str) -> Axes:
        """Axes over which the gradient of a parameter is still to be summed: those over which it is cut have been."""
        split = split_axes(self.parameters[name])
        return tuple(axis for axis in SUMMED_AXES if axis not in split)

    def reduce(self) -> dict[Module, float]:
        """Sum over ranks; returns Σg² in float64 of each module that a sample reached on any rank."""
        step = self.step + 1
        has_gradient = {name for name, parameter in self.trainable.items() if parameter.grad is not None}
        reached = self._side.any([name in has_gradient for name in self._names], step)
        found = [name for name, is_reached in zip(self._names, reached, strict=True) if is_reached]
        present = {name: self.trainable[name] for name in found if name in self.trainable}
        for parameter in present.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        experts = self.holding.experts.cuts
        for axes, collectives in self._sums.items():
            due = [name for name in present if name not in experts and self._due(name) == axes]
            collectives.sum_([_gradient(present[name]) for name in due], step)
        self._expert_sum.sum_([_gradient(p) for name, p in present.items() if name in experts], step)
        if self.holding.plan is not None:
            add_up = partial(self._collectives(self.groups.over(("tp",))).sum_, step=step)
            complete_gradients({name: _gradient(p) for name, p in present.items()}, self.holding.plan, add_up)
        if shared := [_gradient(p) for name, p in present.items() if self.holding.is_shared(name)]:
            self._collectives(self.groups.ends).sum_(shared, step)
        if "encoder_gradient_divided_by_producers" in self.faults:
            self._divide_encoder(present)
        square_sums = {self.module_of[name]: 0.0 for name in found}
        for name, parameter in present.items():
            counts = self.holding.counts(name, parameter)
            square = square_sum(_gradient(parameter)) if counts else 0.0
            square_sums[self.module_of[name]] += square
        return dict(zip(square_sums, self._side.total(list(square_sums.values()), step), strict=True))

    def update(self, order: UpdateOrder) -> None:
        """Carry out one `UpdateOrder`; with `apply` False the gradients are dropped."""
        present = {name: p for name, p in self.trainable.items() if p.grad is not None}
        for parameter in present.values():
            _gradient(parameter).mul_(order.scale)
        if order.gradients_to is not None:
            self._dump({name: p.grad for name, p in present.items()}, Path(order.gradients_to), "gradients")
        if order.apply:
            self._clip(present, order.clip)
            self._apply(order.lr)
        if order.gradients_to is not None:
            self._dump(self.parameters, Path(order.gradients_to), "parameters")
        for tensor in (*self.parameters.values(), *self._own.values()):
            tensor.grad = None
        self.step = order.step

    def _dump(self, tensors: Mapping[str, torch.Tensor], folder: Path, kind: str) -> None:
        """Whole tensors into a file of this side's; every rank takes part, the first one of each place in a pipeline
        writes what no earlier place has."""
        whole = self.holding.gathered(tensors)
        if self.holding.leads_stage:
            write_tensors(whole, folder / f"{self.role.value}-{kind}-{self.holding.stage}.safetensors")

    def save(self, folder: Path) -> None:
        """Write what this rank is the first to hold; the side's first rank adds what is not a tensor."""
        moments: dict[str, list[Piece]] = {}
        for name, own in self._own.items():
            state = self.optimizer.state.get(own, {})
            if self.holding.counts(name, self.parameters[name]):
                for moment, tensor in state.items():
                    moments[f"{moment}/{name}"] = pieces_of(name, tensor, self.parameters[name], self.holding)
        save_parameters(folder, self.parameters, self.holding, self.step)
        write_pieces(folder, OPTIMIZER, self.groups.rank, moments)
        if self.groups.rank == 0:
            write_state(folder, SavedState(self.step, self._freeze, tuple(self._names)))

    def load(self, folders: Sequence[Path]) -> None:
        """Go on from the folders of a checkpoint: parameters, moments and step, bit for bit.

        A parameter that trains now and did not then begins without moments.

        Raises:
            ConfigError: the state belongs to another run.
        """
        state, stored = read_state(folders), Pieces(folders, OPTIMIZER)
        known = [name for name in self.trainable if any(f"{moment}/{name}" in stored for moment in MOMENTS)]
        for name in known:
            for moment in MOMENTS:
                number, parameter = moment == "step", self.parameters[name]
                shape = () if number else self.holding.shape(name, parameter)
                stored.check(f"{moment}/{name}", shape, torch.float32 if number else parameter.dtype)
        load_parameters(folders, self.parameters, self.holding)
        self.optimizer.state.clear()
        for name in known:
            own, boxes = self._own[name], self.holding.boxes(name, self.parameters[name])
            moments = {moment: torch.zeros_like(own.detach()) for moment in MOMENTS if moment != "step"}
            for moment, tensor in moments.items():
                stored.read_into(f"{moment}/{name}", tensor, boxes)
            moments["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
            stored.read_into(f"step/{name}", moments["step"], [Box.number()])
            self.optimizer.state[own] = moments
        self.step = state.step

    @property
    def _freeze(self) -> tuple[str, ...]:
        return tuple(sorted(self.train.freeze))

    def _clip(self, present: Mapping[str, nn.Parameter], clip: float) -> None:
        if clip == 1.0:
            return
        for name, parameter in present.items():
            if "module_not_clipped" in self.faults and self.module_of[name] is Module.PROJECTOR:
                continue
            _gradient(parameter).mul_(clip)

    def _apply(self, lr: Mapping[Module, float]) -> None:
        if "text_only_step_decays_encoder" in self.faults:
            for name, parameter in self.trainable.items():
                if parameter.grad is None and self.module_of[name] is Module.ENCODER:
                    parameter.grad = torch.zeros_like(parameter)
        for name, parameter in self.trainable.items():
            self._own[name].grad = None if parameter.grad is None else _gradient(parameter)
        for group in self.optimizer.param_groups:
            if group["params"]:
                group["lr"] = lr[group["module"]]
        self.optimizer.step()

    def _divide_encoder(self, present: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in present.items():
            if self.module_of[name] is Module.ENCODER:
                _gradient(parameter).div_(self._side.world_size)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of what this rank holds of a parameter."""
    assert parameter.grad is not None, "a parameter that was reached has a gradient"
    return local_tensor(parameter.grad)


def square_sum(tensor: torch.Tensor) -> float:
    """Σx² in float64; on a CPU piece by piece, which takes a quarter of the time of one wider copy of the whole.

    >>> square_sum(torch.tensor([3.0, 4.0]))
    25.0
    """
    if tensor.device.type != "cpu":
        return float(tensor.double().square().sum())
    wide = (piece.double() for piece in tensor.reshape(-1).split(PIECE))
    return sum(float(torch.dot(piece, piece)) for piece in wide)
