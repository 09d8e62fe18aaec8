"""What a rank holds of a half's parameters, whichever axes cut them: the questions of norms, checkpoints and exports.

    whole ─ sections of a pipeline (`models/sections.py`) ─▶ whole, or not here at all
    whole ─ plan of tensor parallelism (`roles.py`) ─▶ part of a tensor-parallel rank ─ FSDP2 (`shard.py`) ─▶ piece here

The first cut is known by a parameter's name, the second by the parameter itself, which then is a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch

from flowtrain.parallel.cuts import Cut
from flowtrain.parallel.experts import ExpertCuts
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.mesh import AXES, coordinates
from flowtrain.parallel.pieces import Box, Region, region_of, split_axes, whole_tensor
from flowtrain.parallel.roles import TensorPlan
from flowtrain.parallel.tensor import whole_of

NO_CUTS = ExpertCuts()


@dataclass(frozen=True)
class Holding:
    """
    Attributes:
        plan: None where no tensor-parallel ranks share the half.
        experts: how experts lie over ranks, none where each has all.
        stages: for every parameter of the half the ranks of a pipeline that hold it, ascending; empty without one.
    """

    groups: Groups
    plan: TensorPlan | None = None
    experts: ExpertCuts = NO_CUTS
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """This process's rank in the pipeline."""
        return coordinates(self.groups.layout, self.groups.rank)["pp"]

    @property
    def leads_stage(self) -> bool:
        """Whether this rank is the first of those that hold the same layers."""
        return self.groups.counts(tuple(axis for axis in AXES if axis != "pp"))

    def names(self, held: Iterable[str]) -> Set[str]:
        """All parameters of the half; `held`: those here."""
        return self.stages.keys() or set(held)

    def is_shared(self, name: str) -> bool:
        """Whether both ends of the pipeline hold a parameter: the embedding, where the head is tied to it."""
        return len(self.stages.get(name, ())) > 1

    def counts_stage(self, name: str) -> bool:
        """Whether this rank's place in the pipeline is the first that holds a tensor."""
        return self.stages.get(name, (0,))[0] == self.stage

    @property
    def tensor_rank(self) -> int:
        return coordinates(self.groups.layout, self.groups.rank)["tp"]

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """All of a parameter, its gradient or a moment, on every rank that holds a part; all of them must call."""
        part, cut = whole_tensor(tensor), self._cut(name)
        if cut is None or part.dim() == 0:
            return part
        return whole_of(part, cut, self.groups.experts if name in self.experts.cuts else self.groups.carrying("tp"))

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All of each tensor, on the first rank of the first place in the pipeline that holds it; every rank calls."""
        found = {}
        for name, tensor in tensors.items():
            whole = self.whole(name, tensor)
            if self.leads_stage and self.counts_stage(name):
                found[name] = whole
        return found

    def boxes(self, name: str, parameter: torch.Tensor) -> list[Box]:
        """Where what lies here of a parameter, or of a tensor like it, lies in the whole."""
        place = region_of(parameter)
        cut = self._cut(name)
        if cut is None:
            return [] if place.is_empty else [Box(place, place.within(place))]
        whole, part = tuple(self.shape(name, parameter)), tuple(parameter.shape)
        found = []
        for there, here in cut.pieces(self._rank_of_cut(name)):
            beside, mine = _region(there, whole), _region(here, part)
            common = place.overlap(mine)
            if not common.is_empty:
                start = tuple(a + b - c for a, b, c in zip(beside.offset, common.offset, mine.offset, strict=True))
                found.append(Box(Region(start, common.shape), common.within(place)))
        return found

    def shape(self, name: str, parameter: torch.Tensor) -> torch.Size:
        """Of the whole parameter."""
        cut = self._cut(name)
        if cut is None:
            return parameter.shape
        return torch.Size(cut.size if dim == cut.dim else n for dim, n in enumerate(parameter.shape))

    def counts(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether what lies here stands for all ranks that hold the same of a parameter."""
        if name in self.experts.cuts:
            return self.counts_stage(name) and self.groups.first_of_experts
        by_plan = ("tp",) if self.plan is not None else ()
        copies = tuple(axis for axis in AXES if axis not in (*split_axes(parameter), *by_plan, "pp"))
        return (
            self.counts_stage(name)
            and self.groups.counts(copies)
            and (self.plan is None or self.plan.counts(name, self.tensor_rank))
        )

    def _cut(self, name: str) -> Cut | None:
        return self.experts.cuts.get(name) or (None if self.plan is None else self.plan.cuts.get(name))

    def _rank_of_cut(self, name: str) -> int:
        return self.experts.rank if name in self.experts.cuts else self.tensor_rank


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """An index of slices, fewer than dims or as many, as a box of a tensor of this shape."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    bounds += [(0, size) for size in shape[len(index) :]]
    return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
