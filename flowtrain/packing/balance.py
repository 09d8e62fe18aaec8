"""Packs of equal cost: rows into a given number of packs, each within its bounds, then packs into slots.

1. `spread`: dearest row first, into the cheapest pack that has room (LPT). Where that ends in a row without room: most
   tokens first, into the fullest pack that has room (best fit decreasing), which finds room more often.
2. `improve`: the dearest pack gives a row to, or swaps one with, a cheap pack, whichever lowers the dearer of the two
   most; a pack that finds no such move is left alone and the next dearest has its turn. The number of moves tried is
   bounded.
3. `slots_of`: packs sorted by cost, a slot is the next R of them (this makes the sum over slots of the dearest pack as
   small as it can be for these packs); within a slot the dearest goes to the rank with the least so far.
4. `johnson`: slots that encode faster than they train come first, least encoding first; then the others, least
   training last. This order makes a two-stage flow shop end earliest: text-heavy packs hide the encoder's start-up.

Invariants: every row in one pack; bounds kept; ties fall by position, so equal inputs give equal packs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.types import SampleMeta

NUM_PARTNERS = 8
"""Cheap packs that the dearest one tries: more of them cost time and gain nothing measurable."""

ROUNDS_PER_PACK = 4

MOST_MOVES = 100_000
"""Moves tried in all, some 50 ms: a step of many rows is nearly equal after step 1 and must not hold up the run."""


class Load(NamedTuple):
    """A sample with what it takes of a pack."""

    cost: int
    tokens: int
    vision_bytes: int
    sample: SampleMeta


class Bounds(NamedTuple):
    """Most of a pack."""

    tokens: int
    vision_bytes: int


@dataclass(slots=True)
class Bin:
    """A pack in the making."""

    loads: list[Load] = field(default_factory=list)
    cost: int = 0
    tokens: int = 0
    vision_bytes: int = 0

    def has_room(self, load: Load, bounds: Bounds) -> bool:
        return (
            self.tokens + load.tokens <= bounds.tokens and self.vision_bytes + load.vision_bytes <= bounds.vision_bytes
        )

    def add(self, load: Load) -> None:
        self.loads.append(load)
        self.cost += load.cost
        self.tokens += load.tokens
        self.vision_bytes += load.vision_bytes

    def remove(self, load: Load) -> None:
        self.loads.remove(load)
        self.cost -= load.cost
        self.tokens -= load.tokens
        self.vision_bytes -= load.vision_bytes

    @property
    def first_position(self) -> int:
        """Of its oldest sample; empty packs come last."""
        return min((load.sample.position for load in self.loads), default=2**63)


def spread(loads: Sequence[Load], num_packs: int, bounds: Bounds) -> list[Bin] | None:
    """Step 1; None when a row found no room either way. Rows within the bounds always fit when there are as many
    packs as rows."""
    return _longest_first(loads, num_packs, bounds) or _best_fit(loads, num_packs, bounds)


def _longest_first(loads: Sequence[Load], num_packs: int, bounds: Bounds) -> list[Bin] | None:
    bins = [Bin() for _ in range(num_packs)]
    heap = [(0, number) for number in range(num_packs)]
    for load in sorted(loads, key=lambda load: (-load.cost, load.sample.position)):
        full = []
        while heap and not bins[heap[0][1]].has_room(load, bounds):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        number = heapq.heappop(heap)[1]
        bins[number].add(load)
        heapq.heappush(heap, (bins[number].cost, number))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _best_fit(loads: Sequence[Load], num_packs: int, bounds: Bounds) -> list[Bin] | None:
    bins = [Bin() for _ in range(num_packs)]
    for load in sorted(loads, key=lambda load: (-load.tokens, -load.vision_bytes, load.sample.position)):
        fitting = [(-bins[n].tokens, n) for n in range(num_packs) if bins[n].has_room(load, bounds)]
        if not fitting:
            return None
        bins[min(fitting)[1]].add(load)
    return bins


def improve(bins: Sequence[Bin], bounds: Bounds) -> None:
    """Step 2, in place."""
    order = sorted(range(len(bins)), key=lambda n: (bins[n].cost, n))
    num_tried = 0
    for _ in range(ROUNDS_PER_PACK * len(bins)):
        if len(order) < 2 or num_tried > MOST_MOVES:
            return
        dear = bins[order[-1]]
        best: tuple[int, Bin, Load, Load | None] | None = None
        for number in sorted(range(len(bins)), key=lambda n: (bins[n].cost, n))[:NUM_PARTNERS]:
            cheap = bins[number]
            if cheap is not dear:
                num_tried += len(dear.loads) * (len(cheap.loads) + 1)
                best = _best_move(dear, cheap, bounds, best)
        if best is None:
            order.pop()
            continue
        _, cheap, given, taken = best
        dear.remove(given)
        cheap.add(given)
        if taken is not None:
            cheap.remove(taken)
            dear.add(taken)
        order.sort(key=lambda n: (bins[n].cost, n))


def _best_move(
    dear: Bin, cheap: Bin, bounds: Bounds, best: tuple[int, Bin, Load, Load | None] | None
) -> tuple[int, Bin, Load, Load | None] | None:
    """The move that leaves the dearer of the two packs cheapest; `best` when none of these is better."""
    lowest = best[0] if best is not None else dear.cost
    for given in dear.loads:
        for taken in (None, *cheap.loads):
            shift = given.cost - (taken.cost if taken is not None else 0)
            left = max(dear.cost - shift, cheap.cost + shift)
            if shift > 0 and left < lowest and _fits(dear, cheap, given, taken, bounds):
                lowest, best = left, (left, cheap, given, taken)
    return best


def _fits(dear: Bin, cheap: Bin, given: Load, taken: Load | None, bounds: Bounds) -> bool:
    tokens = given.tokens - (taken.tokens if taken is not None else 0)
    vision_bytes = given.vision_bytes - (taken.vision_bytes if taken is not None else 0)
    return (
        cheap.tokens + tokens <= bounds.tokens
        and cheap.vision_bytes + vision_bytes <= bounds.vision_bytes
        and dear.tokens - tokens <= bounds.tokens
        and dear.vision_bytes - vision_bytes <= bounds.vision_bytes
    )


def slots_of(bins: Sequence[Bin], num_ranks: int) -> list[list[Bin]]:
    """Step 3: `result[slot][rank]`."""
    assert len(bins) % num_ranks == 0, f"{len(bins)} packs for {num_ranks} ranks"
    ordered = sorted(bins, key=lambda pack: (-pack.cost, pack.first_position))
    so_far = [0] * num_ranks
    slots = []
    for start in range(0, len(ordered), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (so_far[rank], rank))
        slot = [Bin()] * num_ranks
        for rank, pack in zip(ranks, ordered[start : start + num_ranks], strict=True):
            slot[rank] = pack
            so_far[rank] += pack.cost
        slots.append(slot)
    return slots


def johnson(stages: Sequence[tuple[float, float]]) -> list[int]:
    """Step 4: the order of jobs, each given by its time on the first and on the second stage.

    >>> johnson([(3.0, 1.0), (1.0, 2.0), (0.0, 5.0)])
    [2, 1, 0]
    """
    first = sorted((a, n) for n, (a, b) in enumerate(stages) if a < b)
    second = sorted((-b, n) for n, (a, b) in enumerate(stages) if a >= b)
    return [n for _, n in (*first, *second)]
