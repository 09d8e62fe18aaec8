"""Rows that a step may still take, sorted by cost: fill what a pack lacks, exchange a row for one that fits better.

Keys are whole numbers, cost above and age below, so that among rows of equal cost the oldest is found first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable

from flowtrain.packing.load import Bin, Caps, Load

AGE_BITS = 40
NEXT_TRIED = 8
"""Neighbours tried one by one before the search for a row with room goes down in growing strides."""


class Stock:
    """`add`, `largest` and `exchange` keep `keys` sorted; a row is in the stock or in a pack."""

    def __init__(self, loads: Iterable[Load], caps: Caps) -> None:
        self.caps = caps
        self.loads = {load.position: load for load in loads}
        self.keys = sorted([(load.cost << AGE_BITS) + AGE - load.position for load in self.loads.values()])

    def add(self, load: Load) -> None:
        self.loads[load.position] = load
        insort(self.keys, _key(load))

    def remove(self, load: Load) -> None:
        del self.loads[load.position]
        del self.keys[bisect_left(self.keys, _key(load))]

    def largest(self, most: int, room: int) -> Load | None:
        """The dearest row of at most this cost that has room; not always the very dearest where caps bind."""
        keys, loads, guards = self.keys, self.loads, self.caps.guards
        place = bisect_left(keys, (most + 1) << AGE_BITS) - 1
        tried, stride = 0, 1
        while place >= 0:
            load = loads[AGE - (keys[place] & AGE)]
            if (room - load.use) & guards == guards:
                return load
            tried += 1
            if tried >= NEXT_TRIED:
                stride *= 2
            place -= stride
        return None

    def fill(self, pack: Bin, budget: int) -> None:
        """Rows into the pack, each the dearest that fits, until none does."""
        while (load := self.largest(budget - pack.cost, pack.room)) is not None:
            self.remove(load)
            pack.add(load)

    def exchange(self, pack: Bin, target: int, above: bool, kept: Collection[int]) -> bool:
        """Exchange one row of the pack so that its cost comes nearest to the target; whether one was.

        Only from below unless `above`. Rows at the positions `kept` stay.
        """
        lack = target - pack.cost
        best, gone, come = abs(lack), None, None
        keys, loads, guards, room = self.keys, self.loads, self.caps.guards, pack.room
        for load in pack.loads:
            if load.position in kept:
                continue
            wanted = load.cost + lack
            place = bisect_right(keys, (wanted + 1) << AGE_BITS)
            for other in range(place - 1, max(-1, place - 4), -1):
                found = loads[AGE - (keys[other] & AGE)]
                if (room + load.use - found.use) & guards == guards:
                    if wanted - found.cost < best:
                        best, gone, come = wanted - found.cost, load, found
                    break
            if above and place < len(keys):
                found = loads[AGE - (keys[place] & AGE)]
                if found.cost - wanted < best and (room + load.use - found.use) & guards == guards:
                    best, gone, come = found.cost - wanted, load, found
            if not best:
                break
        if gone is None or come is None:
            return False
        pack.remove(gone)
        self.remove(come)
        pack.add(come)
        self.add(gone)
        return True


AGE = (1 << AGE_BITS) - 1


def _key(load: Load) -> int:
    return (load.cost << AGE_BITS) + AGE - load.position
