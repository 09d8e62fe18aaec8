"""The process groups of a side, as one rank sees them: one for each axis, one for the data-parallel ranks, one for all.

Every rank makes every group, in the same order, because making one is itself a collective. Each has the run's time-out:
torch would give them half an hour (C9). The mesh's groups are NCCL's where parameters lie on GPUs; numbers that a step
agrees on, and sums in rank order, go over gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.parallel.mesh import (
    AXES,
    DATA_AXES,
    PEER_AXES,
    SUMMED_AXES,
    Axis,
    coordinates,
    degrees,
    expert_lines,
    lines,
)
from flowtrain.parallel.pieces import Axes
from flowtrain.plan import Layout


@dataclass(frozen=True)
class Groups:
    """`by_axes`: axes → the group of the ranks that differ from this one on them only; where that is one rank, None.

    `mesh`: a mesh with a named dim for every axis of more than one rank; None where the layout needs no pieces.
    `ends`: the first and the last rank of this rank's pipeline, where it is one of them; `lines`: groups of the
    pipeline, for what goes forward and for what goes backward. `experts`: the ranks that have all experts between them,
    and `expert_copies` those that hold the same ones, of other tokens; None for one rank.
    """

    layout: Layout
    rank: int
    by_axes: Mapping[Axes, Any] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    ends: Any = None
    lines: tuple[Any, Any] | None = None
    experts: Any = None
    expert_copies: Any = None

    def over(self, axes: Axes) -> Any:
        """The group over these axes, None for one rank."""
        wide = tuple(axis for axis in axes if degrees(self.layout)[axis] > 1)
        return self.by_axes[wide] if wide else None

    def carrying(self, axis: Axis) -> Any:
        """The group over one axis for tensors that lie on the side's devices; None for one rank."""
        if self.mesh is None or degrees(self.layout)[axis] == 1:
            return None
        return self.mesh[axis].get_group()

    @property
    def whole(self) -> Any:
        """The group of the side."""
        return self.over(AXES)

    @property
    def leads(self) -> bool:
        """Whether this rank answers for its data-parallel rank."""
        return self.layout.leads(self.rank)

    @property
    def first_of_experts(self) -> bool:
        """Whether this rank is the first of those that hold the same experts."""
        return expert_lines(self.layout, self.rank)[1][0] == self.rank and self.counts(("tp",))

    def counts(self, axes: Axes) -> bool:
        """Whether this rank speaks for those that hold the same: it is the first of them on all of `axes`."""
        place = coordinates(self.layout, self.rank)
        return all(place[axis] == 0 for axis in axes)


def join_groups(layout: Layout, rank: int, device: torch.device, timeout_seconds: float) -> Groups:
    """The groups of a side whose default group is up; the same call on every rank."""
    wide: Axes = tuple(axis for axis, degree in degrees(layout).items() if degree > 1)
    data: Axes = tuple(axis for axis in wide if axis in DATA_AXES)
    timeout, on_gpu = timedelta(seconds=timeout_seconds), device.type == "cuda"
    by_axes = {}
    peers: Axes = tuple(axis for axis in wide if axis in PEER_AXES)
    summed = [tuple(axis for axis in wide if axis in SUMMED_AXES and axis != cut) for cut in (None, "dp_shard")]
    for axes in dict.fromkeys((*((axis,) for axis in wide), data, peers, *summed, wide)):
        if axes:
            by_axes[axes] = _group(layout, axes, rank, timeout)
    if layout.world_size == layout.dp_replicate:
        return Groups(layout, rank, by_axes)
    of_mesh = [_group(layout, (axis,), rank, timeout, "nccl") if on_gpu else by_axes[axis,] for axis in wide]
    groups = Groups(layout, rank, by_axes, _mesh(layout, wide, of_mesh, device))
    if layout.pp > 1:
        assert groups.mesh is not None
        backward = _group(layout, ("pp",), rank, timeout, "nccl" if on_gpu else "gloo")
        ends = (
            by_axes["pp",] if layout.pp == 2 else _made([(a, b) for a, *_, b in lines(layout, ("pp",))], rank, timeout)
        )
        groups = replace(groups, ends=ends, lines=(groups.mesh["pp"].get_group(), backward))
    if layout.ep > 1:
        of_ranks = [expert_lines(layout, other) for other in range(layout.world_size)]
        exchanging, copies = (list(dict.fromkeys(of_rank[kind] for of_rank in of_ranks)) for kind in (0, 1))
        experts = _made(exchanging, rank, timeout, "nccl" if on_gpu else None)
        groups = replace(groups, experts=experts, expert_copies=_made(copies, rank, timeout))
    return groups


def _made(sets: Sequence[tuple[int, ...]], rank: int, timeout: timedelta, backend: str | None = None) -> Any:
    """A group for each set of ranks; returns that of this rank, None where it is alone or in none."""
    mine = None
    for ranks in sets:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            mine = group if rank in ranks else mine
    return mine


def _group(layout: Layout, axes: Axes, rank: int, timeout: timedelta, backend: str | None = None) -> Any:
    """The group of this rank over `axes`; `backend` None: that of the side's default group, which may be used again."""
    mine = None
    for ranks in lines(layout, axes):
        if backend is None and len(ranks) == layout.world_size:
            group = dist.group.WORLD
        else:
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        mine = group if rank in ranks else mine
    return mine


def _mesh(layout: Layout, wide: Axes, groups: list[Any], device: torch.device) -> DeviceMesh:
    ranks = torch.arange(layout.world_size).view([degrees(layout)[axis] for axis in wide])
    group = groups[0] if len(groups) == 1 else groups
    return DeviceMesh.from_group(group, device.type, mesh=ranks if len(groups) > 1 else None, mesh_dim_names=wide)
