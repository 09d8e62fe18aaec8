"""Where a rank stands in its side's layout: plain arithmetic, no torch, no clock.

    rank = (((pp · R + dp_replicate) · F + dp_shard) · C + cp) · T + tp          R, F, C, T: degrees of the layout

      r2f2t2      tp 0  1            ranks 0 1: peers, one data-parallel rank, the same packs
      replica 0        [0  1] shard 0     dp_rank 0
                       [2  3] shard 1     dp_rank 1
      replica 1        [4  5] shard 0     dp_rank 2
                       [6  7] shard 1     dp_rank 3

| axis | its ranks | hold |
|---|---|---|
| `dp_replicate` | train packs of their own | the same pieces of the parameters |
| `dp_shard` | train packs of their own, forward by forward together | a piece each |
| `cp`, `tp`, `pp` | are peers: one data-parallel rank, the same packs | as their axis says |

Invariants: ranks and coordinates are one to one; peers of a data-parallel rank have neighbouring numbers within a
stage, so that they share a node where one can hold them; every line of an axis is ascending.
"""

from __future__ import annotations

from functools import cache
from itertools import compress, product
from math import prod
from typing import Literal

from flowtrain.plan import Layout

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
Coordinates = dict[Axis, int]

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outside to the inside: the last one goes through neighbouring ranks."""

PEER_AXES: tuple[Axis, ...] = ("pp", "cp", "tp")
"""Axes whose ranks are one data-parallel rank."""

SUMMED_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "cp")
"""Axes over which gradients are summed: their ranks see other packs, or other tokens."""

DATA_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
"""Axes over which the gradients of different packs are summed."""


def degrees(layout: Layout) -> dict[Axis, int]:
    """Degree of every axis, outermost first."""
    return {axis: getattr(layout, axis) for axis in AXES}


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Place of a rank on every axis.

    >>> coordinates(Layout(dp_replicate=2, dp_shard=2), 2)["dp_replicate"]
    1
    """
    assert 0 <= rank < layout.world_size, f"rank {rank} of a layout of {layout.world_size}"
    place: Coordinates = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, degrees(layout)[axis])
    return place


def rank_at(layout: Layout, place: Coordinates) -> int:
    """The rank at these coordinates."""
    rank = 0
    for axis, degree in degrees(layout).items():
        rank = rank * degree + place[axis]
    return rank


@cache  # asked for with every order and answer of a run
def dp_rank(layout: Layout, rank: int) -> int:
    """The data-parallel rank that a rank belongs to: the number that packs and units know it by."""
    place = coordinates(layout, rank)
    return place["dp_replicate"] * layout.dp_shard + place["dp_shard"]


@cache
def peers(layout: Layout, dp: int) -> tuple[int, ...]:
    """All ranks of one data-parallel rank, ascending; the first is the one that answers for it."""
    assert 0 <= dp < layout.dp_degree, f"data-parallel rank {dp} of {layout.dp_degree}"
    return tuple(rank for rank in range(layout.world_size) if dp_rank(layout, rank) == dp)


def expert_lines(layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that have all experts between them, and those that hold the same experts, this rank among both.

    Ranks of `dp_shard` and `cp` are numbered together, and `ep` neighbours among them have all experts.

    >>> expert_lines(Layout(dp_shard=4, ep=2), 1)
    ((0, 1), (1, 3))
    """
    place = coordinates(layout, rank)

    def number(place: Coordinates) -> int:
        return place["dp_shard"] * layout.cp + place["cp"]

    def same(other: Coordinates, *axes: Axis) -> bool:
        return all(other[axis] == place[axis] for axis in axes)

    places = [coordinates(layout, other) for other in range(layout.world_size)]
    own, ep = number(place), layout.ep
    exchanging = [same(p, "pp", "dp_replicate", "tp") and number(p) // ep == own // ep for p in places]
    copies = [same(p, "pp", "tp") and number(p) % ep == own % ep for p in places]
    return tuple(compress(range(len(places)), exchanging)), tuple(compress(range(len(places)), copies))


def lines(layout: Layout, axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    """Every set of ranks that differ on `axes` only; together they are all ranks, each once.

    >>> lines(Layout(dp_replicate=2, dp_shard=2), ("dp_shard",))
    [(0, 1), (2, 3)]
    """
    sizes = degrees(layout)
    others: tuple[Axis, ...] = tuple(axis for axis in AXES if axis not in axes)
    inside: tuple[Axis, ...] = tuple(axis for axis in AXES if axis in axes)
    found = []
    for outer in product(*(range(sizes[axis]) for axis in others)):
        fixed: Coordinates = dict(zip(others, outer, strict=True))
        found.append(
            tuple(
                rank_at(layout, fixed | dict(zip(inside, inner, strict=True)))
                for inner in product(*(range(sizes[axis]) for axis in inside))
            )
        )
    assert prod(map(len, found[:1])) * len(found) == layout.world_size
    return found
