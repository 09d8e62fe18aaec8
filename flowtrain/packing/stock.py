"""Rows that a step may still take, sorted by cost: fill what a pack lacks, exchange a row for one that fits better.

Of rows of equal cost the oldest is found first: it comes last. A row becomes a `Load` when it leaves: few do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection

import numpy as np

from flowtrain.packing.load import Bin, Caps, Ints, Load
from flowtrain.packing.table import LoadTable

NEXT_TRIED = 8
"""Neighbours tried one by one before the search for a row with room goes down in growing strides."""

NEAREST = 3
"""Rows below a wanted cost that are tried for an exchange."""


class Stock:
    """Rows of a table: their `places`, `costs` and `uses`, side by side. A row is in the stock or in a pack."""

    def __init__(self, rows: LoadTable, places: Ints, caps: Caps) -> None:
        self.rows, self.caps = rows, caps
        costs = rows.costs[places]
        order = np.lexsort((-places, costs))
        ordered = places[order]
        self.costs: list[int] = costs[order].tolist()
        self.places: list[int] = ordered.tolist()
        self.uses: list[int] = rows.uses[ordered].tolist()

    def add(self, load: Load) -> None:
        """A row of the table comes back."""
        first, behind = bisect_left(self.costs, load.cost), bisect_right(self.costs, load.cost)
        at = bisect_left(self.places, -load.place, first, behind, key=lambda place: -place)
        self.places.insert(at, load.place)
        self.costs.insert(at, load.cost)
        self.uses.insert(at, load.use)

    def pop(self, at: int) -> Load:
        cost, use, place = self.costs.pop(at), self.uses.pop(at), self.places.pop(at)
        rows = self.rows
        position, tokens, encode = rows.positions.item(place), rows.sizes.item(0, place), rows.encodes.item(place)
        return Load(cost, use, position, tokens, encode, place, rows.samples[place])

    def largest(self, most: int, room: int) -> int | None:
        """Where the dearest row of at most this cost stands that has room; not always the very dearest where caps
        bind."""
        uses, guards = self.uses, self.caps.guards
        at = bisect_right(self.costs, most) - 1
        tried, stride = 0, 1
        while at >= 0:
            if (room - uses[at]) & guards == guards:
                return at
            tried += 1
            if tried >= NEXT_TRIED:
                stride *= 2
            at -= stride
        return None

    def fill(self, pack: Bin, budget: int) -> None:
        """Rows into the pack, each the dearest that fits, until none does."""
        while (at := self.largest(budget - pack.cost, pack.room)) is not None:
            pack.add(self.pop(at))

    def exchange(self, pack: Bin, target: int, above: bool, kept: Collection[int]) -> bool:
        """Exchange one row of the pack so that its cost comes nearest to the target; whether one was.

        Only from below unless `above`. Rows at the positions `kept` stay.
        """
        lack = target - pack.cost
        best, gone, come = abs(lack), None, -1
        costs, uses, guards = self.costs, self.uses, self.caps.guards
        for load in pack.loads:
            if load.position in kept:
                continue
            wanted, room = load.cost + lack, pack.room + load.use
            at = bisect_right(costs, wanted)
            for other in range(at - 1, max(-1, at - 1 - NEAREST), -1):
                if wanted - costs[other] >= best:
                    break
                if (room - uses[other]) & guards == guards:
                    best, gone, come = wanted - costs[other], load, other
                    break
            if above and at < len(costs):
                more = costs[at] - wanted
                if more < best and (room - uses[at]) & guards == guards:
                    best, gone, come = more, load, at
            if not best:
                break
        if gone is None:
            return False
        pack.remove(gone)
        pack.add(self.pop(come))
        self.add(gone)
        return True
