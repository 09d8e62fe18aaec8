"""What a rank holds of a half's parameters, whichever axes cut them: the questions of norms, checkpoints and exports.

    whole ─ plan of tensor parallelism (`roles.py`) ─▶ part of a tensor-parallel rank ─ FSDP2 (`shard.py`) ─▶ piece here

The first cut is known by a parameter's name, the second by the parameter itself, which then is a DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowtrain.parallel.groups import Groups
from flowtrain.parallel.mesh import AXES, coordinates
from flowtrain.parallel.pieces import Box, Region, region_of, split_axes, whole_tensor
from flowtrain.parallel.roles import TensorPlan
from flowtrain.parallel.tensor import whole_of


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

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All of each tensor on the side's first rank, nothing on the others; every rank must call."""
        found = {}
        for name, tensor in tensors.items():
            whole = self.whole(name, tensor)
            if self.groups.rank == 0:
                found[name] = whole
        return found

    def boxes(self, name: str, parameter: torch.Tensor) -> list[Box]:
        """Where what lies here of a parameter, or of a tensor like it, lies in the whole."""
        place = region_of(parameter)
        cut = None if self.plan is None else self.plan.cuts.get(name)
        if cut is None:
            return [] if place.is_empty else [Box(place, place.within(place))]
        whole, part = tuple(self.shape(name, parameter)), tuple(parameter.shape)
        found = []
        for there, here in cut.pieces(self.tensor_rank):
            beside, mine = _region(there, whole), _region(here, part)
            common = place.overlap(mine)
            if not common.is_empty:
                start = tuple(a + b - c for a, b, c in zip(beside.offset, common.offset, mine.offset, strict=True))
                found.append(Box(Region(start, common.shape), common.within(place)))
        return found

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


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """An index of slices, fewer than dims or as many, as a box of a tensor of this shape."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    bounds += [(0, size) for size in shape[len(index) :]]
    return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
