"""The end of a step on one side of the cut: sum the gradients over its ranks, then scale, clip and step.

    gradients of the sum of losses ─reduce─▶ summed over ranks, Σg² per module ──▶ controller
                                                                                       │
    parameters ◀─ AdamW ◀─ × clip ◀─ (dump for verify) ◀─ × scale ◀─ update ◀── UpdateOrder

Invariants: after `reduce` every rank holds the same gradients, bit for bit; a parameter that no rank reached has grad
None and is left alone (C2); after `update` no parameter has a gradient; only trainable parameters are ever changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowtrain.config.schema import TrainConfig
from flowtrain.messages import UpdateOrder
from flowtrain.models.weights import write_tensors
from flowtrain.types import Module, Role
from flowtrain.update.collectives import Collectives
from flowtrain.update.optimizer import make_optimizer
from flowtrain.update.storage import SavedState, load_side, save_side

TIMEOUT_SECONDS = 600.0


class Updater:
    """Owns the optimizer of one side on one rank.

    Args:
        parameters: all parameters of the side, by whole-model name, in the same order on every rank.
        module_of: the module of each.
        group: process group of the side's ranks; None for one rank.
        faults: faults planted on purpose (`debug.faults`); those of the update are handled here.
        timeout_seconds: longest wait for one collective.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        module_of: Mapping[str, Module],
        train: TrainConfig,
        group: Any,
        rank: int,
        faults: frozenset[str] = frozenset(),
        role: Role = Role.CONSUMER,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.parameters = dict(parameters)
        self.module_of = dict(module_of)
        self.train = train
        self.rank = rank
        self.faults = faults
        self.role = role
        self.step = 0
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = make_optimizer(self.parameters, self.module_of, train)
        self.timeout_seconds = timeout_seconds
        self.regroup(group)

    def regroup(self, group: Any) -> None:
        """Sum over the ranks of another process group from here on; None for one rank."""
        self._collectives = Collectives(group, f"{self.role} {self.rank}", self.timeout_seconds)

    def reduce(self) -> dict[Module, float]:
        """Sum over ranks; returns Σg² in float64 of each module that a sample reached on any rank."""
        step = self.step + 1
        names = list(self.trainable)
        reached = self._collectives.any([self.trainable[name].grad is not None for name in names], step)
        present = {name: self.trainable[name] for name, found in zip(names, reached, strict=True) if found}
        for parameter in present.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._collectives.sum_([_gradient(parameter) for parameter in present.values()], step)
        if "encoder_gradient_divided_by_producers" in self.faults:
            self._divide_encoder(present)
        square_sums: dict[Module, float] = {}
        for name, parameter in present.items():
            module = self.module_of[name]
            square_sums[module] = square_sums.get(module, 0.0) + float(_gradient(parameter).double().square().sum())
        return dict(zip(square_sums, self._collectives.from_first(list(square_sums.values()), step), strict=True))

    def update(self, order: UpdateOrder) -> None:
        """Carry out one `UpdateOrder`; with `apply` False the gradients are dropped."""
        present = {name: p for name, p in self.trainable.items() if p.grad is not None}
        for parameter in present.values():
            _gradient(parameter).mul_(order.scale)
        dump = Path(order.gradients_to) if order.gradients_to is not None and self.rank == 0 else None
        if dump is not None:
            gradients = {name: _gradient(parameter) for name, parameter in present.items()}
            write_tensors(gradients, dump / f"{self.role.value}-gradients.safetensors")
        if order.apply:
            self._clip(present, order.clip)
            self._apply(order.lr)
        if dump is not None:
            write_tensors(self.parameters, dump / f"{self.role.value}-parameters.safetensors")
        self.optimizer.zero_grad(set_to_none=True)
        self.step = order.step

    def save(self, folder: Path) -> None:
        """Write the state of this side (rank 0; every rank holds the same)."""
        if self.rank == 0:
            save_side(
                folder, self.parameters, self.optimizer, SavedState(self.step, self._freeze, tuple(self.trainable))
            )

    def load(self, folder: Path) -> None:
        """Go on from `folder`: parameters, moments and step, bit for bit."""
        self.step = load_side(folder, self.parameters, self.optimizer, self._freeze, tuple(self.trainable)).step

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
        for group in self.optimizer.param_groups:
            group["lr"] = lr[group["module"]]
        self.optimizer.step()

    def _divide_encoder(self, present: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in present.items():
            if self.module_of[name] is Module.ENCODER:
                _gradient(parameter).div_(self._collectives.world_size)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "a parameter that was reached has a gradient"
    return parameter.grad
