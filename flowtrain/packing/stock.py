"""Rows that a step may still take, sorted by cost: fill what a pack lacks, exchange a row for one that fits better.

Of rows of equal cost the oldest is found first: it comes last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable

from flowtrain.packing.load import COST, POSITION, Bin, Caps, Load

NEXT_TRIED = 8
"""Neighbours tried one by one before the search for a row with room goes down in growing strides."""

NEAREST = 3
"""Rows below a wanted cost that are tried for an exchange."""


class Stock:
    """`loads` stay sorted, and `costs` beside them; a row is in the stock or in a pack."""

    def __init__(self, loads: Iterable[Load], caps: Caps) -> None:
        self.caps = caps
        self.loads = sorted(loads, key=POSITION, reverse=True)
        self.loads.sort(key=COST)
        self.costs = list(map(COST, self.loads))

    def add(self, load: Load) -> None:
        first, behind = bisect_left(self.costs, load.cost), bisect_right(self.costs, load.cost)
        place = bisect_left(self.loads, -load.position, first, behind, key=lambda other: -other.position)
        self.loads.insert(place, load)
        self.costs.insert(place, load.cost)

    def pop(self, place: int) -> Load:
        del self.costs[place]
        return self.loads.pop(place)

    def largest(self, most: int, room: int) -> int | None:
        """Place of the dearest row of at most this cost that has room; not always the very dearest where caps bind."""
        loads, guards = self.loads, self.caps.guards
        place = bisect_right(self.costs, most) - 1
        tried, stride = 0, 1
        while place >= 0:
            if (room - loads[place].use) & guards == guards:
                return place
            tried += 1
            if tried >= NEXT_TRIED:
                stride *= 2
            place -= stride
        return None

    def fill(self, pack: Bin, budget: int) -> None:
        """Rows into the pack, each the dearest that fits, until none does."""
        while (place := self.largest(budget - pack.cost, pack.room)) is not None:
            pack.add(self.pop(place))

    def exchange(self, pack: Bin, target: int, above: bool, kept: Collection[int]) -> bool:
        """Exchange one row of the pack so that its cost comes nearest to the target; whether one was.

        Only from below unless `above`. Rows at the positions `kept` stay.
        """
        lack = target - pack.cost
        best, gone, come = abs(lack), None, -1
        loads, costs, guards, room = self.loads, self.costs, self.caps.guards, pack.room
        for load in pack.loads:
            if load.position in kept:
                continue
            wanted = load.cost + lack
            place = bisect_right(costs, wanted)
            for other in range(place - 1, max(-1, place - 1 - NEAREST), -1):
                if wanted - costs[other] >= best:
                    break
                if (room + load.use - loads[other].use) & guards == guards:
                    best, gone, come = wanted - costs[other], load, other
                    break
            if above and place < len(costs):
                more = costs[place] - wanted
                if more < best and (room + load.use - loads[place].use) & guards == guards:
                    best, gone, come = more, load, place
            if not best:
                break
        if gone is None:
            return False
        pack.remove(gone)
        pack.add(self.pop(come))
        self.add(gone)
        return True
