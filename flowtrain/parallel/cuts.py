"""Which part of a whole tensor each tensor-parallel rank holds, as index ranges along one dim.

    plain         [0 1 2 3]                  ranks 0, 1 hold  [0 1] [2 3]
    by parts      [q0 q1 | k0 k1 | v0 v1]    ranks 0, 1 hold  [q0 k0 v0] [q1 k1 v1]
    shared heads  [k0 k1] over four ranks    ranks 0 … 3 hold [k0] [k0] [k1] [k1]

Ranges say all that loading, gradients and checkpoints need: what to read, which ranks hold the same, how to put the
whole together again.

Invariants: the ranges of all ranks cover the dim; two ranks hold the same ranges or none in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from flowtrain.errors import PlanError

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A tensor cut along `dim`; `ranges[rank]`: [start, stop) of the whole, in the order in which a rank holds them."""

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def degree(self) -> int:
        return len(self.ranges)

    @property
    def size(self) -> int:
        """Of the whole, along `dim`."""
        return max(stop for ranges in self.ranges for _, stop in ranges)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each rank the first one that holds the same: it counts in norms and writes checkpoints."""
        first: dict[tuple[Range, ...], int] = {}
        return tuple(first.setdefault(ranges, rank) for rank, ranges in enumerate(self.ranges))

    @property
    def sharing(self) -> int:
        """How many ranks hold each part."""
        return self.degree // len(set(self.owners))

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same as `rank`, itself among them, in order."""
        return tuple(other for other, owner in enumerate(self.owners) if owner == self.owners[rank])

    def indices(self, rank: int) -> list[tuple[slice, ...]]:
        """Where a rank's pieces lie in the whole: for a tensor or a slice of a safetensors file."""
        return [(slice(None),) * self.dim + (slice(start, stop),) for start, stop in self.ranges[rank]]

    def pieces(self, rank: int) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """For each piece, where it lies in the whole and where in the rank's part."""
        ahead, places = 0, []
        for index, (start, stop) in zip(self.indices(rank), self.ranges[rank], strict=True):
            places.append((index, (slice(None),) * self.dim + (slice(ahead, ahead + stop - start),)))
            ahead += stop - start
        return places

    def assert_invariants(self, size: int) -> None:
        """The ranges of the owners tile [0, size) once."""
        held = sorted(piece for rank, owner in enumerate(self.owners) if rank == owner for piece in self.ranges[rank])
        assert held, "a cut has ranges"
        assert (held[0][0], held[-1][1]) == (0, size), f"{held} does not cover {size}"
        assert all(one[1] == other[0] for one, other in pairwise(held)), f"{held} overlaps or has holes"


def cut_runs(size: int, degree: int, dim: int, parts: int = 1, unit: int = 1) -> Cut:
    """`parts` equal parts laid end to end, each cut into `degree` runs of whole units that differ by one unit at most.

    A unit is what must stay together: a head's rows, or one row where rows need no neighbours (a vocabulary, an MLP).
    """
    units, left = divmod(size, parts * unit)
    assert left == 0, f"{size} rows are not {parts} parts of units of {unit}"
    assert units >= degree, f"{units} units cannot be cut for {degree} ranks"
    bounds = [units * rank // degree * unit for rank in range(degree + 1)]
    starts = [part * units * unit for part in range(parts)]
    return Cut(dim, tuple(tuple((at + start, at + stop) for at in starts) for start, stop in pairwise(bounds)))


def cut_heads(num_heads: int, head_dim: int, degree: int, dim: int) -> Cut:
    """Heads over ranks; where there are fewer heads than ranks, neighbouring ranks hold the same one."""
    if num_heads >= degree:
        return cut_runs(num_heads * head_dim, degree, dim, unit=head_dim)
    heads = [rank * num_heads // degree for rank in range(degree)]
    return Cut(dim, tuple(((head * head_dim, (head + 1) * head_dim),) for head in heads))


def check_heads(what: str, num_heads: int, num_key_value_heads: int, degree: int) -> None:
    """Refuse, before anything is loaded, heads that do not divide; `what` is such as `consumers.layout: t3, backbone`.

    Raises:
        PlanError: with heads, KV heads and ranks.
    """
    shares = num_key_value_heads % degree == 0 or degree % num_key_value_heads == 0
    if num_heads % degree or not shares:
        raise PlanError(
            f"{what}: {num_heads} attention heads and {num_key_value_heads} key-value heads do not divide by {degree} "
            "ranks; choose a degree that divides the heads and divides, or is divided by, the "
            "key-value heads"
        )


def take(whole: Any, cut: Cut, rank: int) -> list[Any]:
    """The pieces of a rank, to be joined along `cut.dim`: views of a tensor, or reads of a safetensors slice."""
    return [whole[index] for index in cut.indices(rank)]
