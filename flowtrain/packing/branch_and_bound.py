"""The best packs of a few rows: where a pack has three or four rows, moves and swaps end up to a tenth above the best.

Rows are placed dearest first, each in the packs in turn, cheapest first; of packs that are alike one is tried. A branch
is cut where

1. a pack would cost as much as the dearest of the best packs so far, or
2. what all packs still lack of that is less than the rows left cost; a pack with less room than the cheapest row lacks
   nothing.

The search ends at the lower bound of `flowtrain.packing.bounds` (`NEAR` of it), or after `MOST_NODES` placed rows, with
the best packs that it found by then: a number, never a time, so that all who compose agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from flowtrain.packing.bounds import dearest_pack
from flowtrain.packing.load import Bin, Caps, Load

MOST_ROWS = 32
"""More rows than this leave too little of the tree to be seen, and are even without it."""

MOST_NODES = 4000
"""Some 10 ms."""

NEAR = 500
"""Packs this share (one in …) above the lower bound are good enough."""


def best_packs(loads: Sequence[Load], num_packs: int, caps: Caps, below: int | None = None) -> list[Bin] | None:
    """Packs of all rows whose dearest costs as little as the search finds. None where it finds none, or none that cost
    less than `below`, which are not looked for where that is near the lower bound."""
    if len(loads) > MOST_ROWS:
        return None
    search = _Search(loads, num_packs, caps)
    if below is not None:
        if below <= search.enough:
            return None
        search.lowest = below
    search.place(0)
    return search.packs()


class _Search:
    """Invariant: `costs` and `rooms` are those of the rows before the one to be placed, where `numbers` says."""

    def __init__(self, loads: Sequence[Load], num_packs: int, caps: Caps) -> None:
        self.ordered = sorted(loads, key=lambda load: (-load.cost, load.position))
        costs = [load.cost for load in self.ordered]
        self.caps, self.lowest = caps, sum(costs) + 1
        bound = dearest_pack(costs, num_packs)
        self.enough = bound + bound // NEAR
        self.rests = [*accumulate(reversed(costs))][::-1]
        self.costs, self.rooms = [0] * num_packs, [caps.room] * num_packs
        self.numbers = [0] * len(loads)
        self.found: list[int] | None = None
        self.num_nodes = 0

    def place(self, row: int) -> bool:
        """Place this row and those behind it in every way that may be better; whether the search is over."""
        costs, rooms = self.costs, self.rooms
        if row == len(self.ordered):
            self.found, self.lowest = list(self.numbers), max(costs)
            return self.lowest <= self.enough
        self.num_nodes += 1
        if self.num_nodes > MOST_NODES:
            return True
        most, cheapest = self.lowest - 1, self.ordered[-1].cost
        if sum([most - cost for cost in costs if most - cost >= cheapest]) < self.rests[row]:
            return False
        load, guards = self.ordered[row], self.caps.guards
        tried = set()
        for number in sorted(range(len(costs)), key=costs.__getitem__):
            cost, room = costs[number], rooms[number]
            if cost + load.cost >= self.lowest:
                break
            if (cost, room) in tried or (room - load.use) & guards != guards:
                continue
            tried.add((cost, room))
            costs[number], rooms[number], self.numbers[row] = cost + load.cost, room - load.use, number
            over = self.place(row + 1)
            costs[number], rooms[number] = cost, room
            if over:
                return True
        return False

    def packs(self) -> list[Bin] | None:
        if self.found is None:
            return None
        bins = [Bin(self.caps.room) for _ in self.costs]
        for load, number in zip(self.ordered, self.found, strict=True):
            bins[number].add(load)
        return bins
