"""What a rank holds of a half's parameters, whichever axes cut them: the questions of norms, checkpoints and exports.

    whole ─ plan of tensor parallelism (`roles.py`) ─▶ part of a tensor-parallel rank ─ FSDP2 (`shard.py`) ─▶ piece here

The first cut is known by a parameter's name, the second by the parameter itself, which then is a DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowtrain.parallel.groups import Groups
from flowtrain.parallel.mesh import AXES, coordinates
from flowtrain.parallel.pieces import piece_of, split_axes, whole_tensor
from flowtrain.parallel.roles import TensorPlan
from flowtrain.parallel.tensor import cut_tensor, whole_of


@dataclass(frozen=True)
class Holding:
    """`plan`: None where no tensor-parallel ranks share the half."""

    groups: Groups
    plan: TensorPlan | None = None

    @property
    def tensor_rank(self) -> int:
        return coordinates(self.groups.layout, self.groups.rank)["tp"]

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """All of a parameter, its gradient or a moment, on every rank that holds a part; all of them must call."""
        part = whole_tensor(tensor)
        if self.plan is None or part.dim() == 0:
            return part
        return whole_of(name, part, self.plan, self.groups.over(("tp",)))

    def piece(self, name: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that lies here where it is cut as `parameter` is."""
        if self.plan is not None and whole.dim():
            whole = cut_tensor(whole, self.plan.cuts.get(name), self.tensor_rank)
        return piece_of(whole, parameter)

    def shape(self, name: str, parameter: torch.Tensor) -> torch.Size:
        """Of the whole parameter."""
        cut = None if self.plan is None else self.plan.cuts.get(name)
        if cut is None:
            return parameter.shape
        return torch.Size(cut.size if dim == cut.dim else n for dim, n in enumerate(parameter.shape))

    def counts(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether what lies here stands for all ranks that hold the same of a parameter."""
        by_plan = ("tp",) if self.plan is not None else ()
        copies = tuple(axis for axis in AXES if axis not in split_axes(parameter) and axis not in by_plan)
        return self.groups.counts(copies) and (self.plan is None or self.plan.counts(name, self.tensor_rank))
