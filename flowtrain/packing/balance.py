"""Packs of equal cost: rows into a given number of packs, each within its caps.

1. `spread`: dearest row first, into the cheapest pack that has room (LPT). Where that ends in a row without room: most
   tokens first, into the fullest pack that has room (best fit decreasing), which finds room more often.
2. `improve`: the dearest pack gives a row to, or swaps one with, a cheap pack, whichever lowers the dearer of the two
   most; a pack that finds no such move is left alone and the next dearest has its turn. The number of moves tried is
   bounded.
3. `even_out`: step 2, and of few rows that it leaves uneven the best packs (`flowtrain.packing.branch_and_bound`).
4. `fewest_packs`: the smallest number of packs, a multiple of the ranks, for which step 1 ends well, or of few rows any
   packs can be found.

Invariants: every row in one pack; caps kept; ties fall by position, so equal inputs give equal packs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from flowtrain.packing.branch_and_bound import best_packs
from flowtrain.packing.load import Bin, Caps, Load

NUM_PARTNERS = 8
"""Cheap packs that the dearest one tries: more of them cost time and gain nothing measurable."""

ROUNDS_PER_PACK = 4

MOST_MOVES = 100_000
"""Moves tried in all, some 50 ms: a step of many rows is nearly equal after step 1 and must not hold up the run."""


def spread(loads: Sequence[Load], num_packs: int, caps: Caps) -> list[Bin] | None:
    """Step 1; None when a row found no room either way. Rows within the caps always fit when there are as many packs
    as rows."""
    return _longest_first(loads, num_packs, caps) or best_fit(loads, num_packs, caps)


def _longest_first(loads: Sequence[Load], num_packs: int, caps: Caps) -> list[Bin] | None:
    bins = [Bin(caps.room) for _ in range(num_packs)]
    heap = [(0, number) for number in range(num_packs)]
    guards = caps.guards
    for load in sorted(loads, key=lambda load: (-load.cost, load.position)):
        full = []
        while heap and (bins[heap[0][1]].room - load.use) & guards != guards:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        number = heap[0][1]
        bins[number].add(load)
        heapq.heapreplace(heap, (bins[number].cost, number))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def best_fit(loads: Sequence[Load], num_packs: int, caps: Caps) -> list[Bin] | None:
    """Most tokens first, into the fullest pack with room; None when a row finds none."""
    bins = [Bin(caps.room) for _ in range(num_packs)]
    order: list[tuple[int, int]] = [(-caps.limits[0], number) for number in range(num_packs)]
    for load in sorted(loads, key=lambda load: (-load.tokens, -load.use, load.position)):
        place = find_room(order, bins, load, caps)
        if place is None:
            return None
        put_in_order(order, place, bins, load)
    return bins


def find_room(order: Sequence[tuple[int, int]], bins: Sequence[Bin], load: Load, caps: Caps) -> int | None:
    """Place in `order` (tokens left, negative, then number) of the fullest pack with room for the load."""
    # Ascending by minus the tokens left: packs with room for the tokens come first, the fullest of them last.
    place = bisect_right(order, (-load.tokens, len(bins)))
    while place:
        number = order[place - 1][1]
        if (bins[number].room - load.use) & caps.guards == caps.guards:
            return place - 1
        place -= 1
    return None


def put_in_order(order: list[tuple[int, int]], place: int, bins: Sequence[Bin], load: Load) -> None:
    """Add the load to the pack at `place` of `order` and move the pack to its new place."""
    left, number = order.pop(place)
    bins[number].add(load)
    insort(order, (left + load.tokens, number))


def improve(bins: Sequence[Bin], caps: Caps) -> None:
    """Step 2, in place."""
    ordered = sorted((pack.cost, number) for number, pack in enumerate(bins))
    numbers = {pack: number for number, pack in enumerate(bins)}
    given_up: set[int] = set()
    num_tried = 0
    for _ in range(ROUNDS_PER_PACK * len(bins)):
        if len(bins) - len(given_up) < 2 or num_tried > MOST_MOVES:
            return
        dearest = next(number for _, number in reversed(ordered) if number not in given_up)
        dear = bins[dearest]
        best: tuple[int, Bin, Load, Load | None] | None = None
        for _, number in ordered[:NUM_PARTNERS]:
            cheap = bins[number]
            if cheap is not dear:
                num_tried += len(dear.loads) * (len(cheap.loads) + 1)
                best = _best_move(dear, cheap, caps, best)
        if best is None:
            given_up.add(dearest)
            continue
        _, cheap, given, taken = best
        for pack in (dear, cheap):
            del ordered[bisect_left(ordered, (pack.cost, numbers[pack]))]
        dear.remove(given)
        cheap.add(given)
        if taken is not None:
            cheap.remove(taken)
            dear.add(taken)
        for pack in (dear, cheap):
            insort(ordered, (pack.cost, numbers[pack]))


def _best_move(
    dear: Bin, cheap: Bin, caps: Caps, best: tuple[int, Bin, Load, Load | None] | None
) -> tuple[int, Bin, Load, Load | None] | None:
    """The move that leaves the dearer of the two packs cheapest; `best` when none of these is better."""
    lowest = best[0] if best is not None else dear.cost
    guards = caps.guards
    for given in dear.loads:
        for taken in (None, *cheap.loads):
            shift, use = (given.cost - taken.cost, given.use - taken.use) if taken else (given.cost, given.use)
            left = max(dear.cost - shift, cheap.cost + shift)
            if (
                shift > 0
                and left < lowest
                and (cheap.room - use) & guards == guards
                and (dear.room + use) & guards == guards
            ):
                lowest, best = left, (left, cheap, given, taken)
    return best


def even_out(bins: Sequence[Bin], caps: Caps) -> list[Bin]:
    """Step 3; the packs given may be changed."""
    improve(bins, caps)
    loads = [load for pack in bins for load in pack.loads]
    return best_packs(loads, len(bins), caps, max(pack.cost for pack in bins)) or list(bins)


def fewest_packs(loads: Sequence[Load], num_ranks: int, caps: Caps) -> list[Bin]:
    """Step 4; ends at one row a pack at the latest."""
    num_slots = max(1, -(-caps.fewest_packs(loads) // num_ranks))
    while (bins := _packs(loads, num_slots * num_ranks, caps)) is None:
        num_slots += 1
    return bins


def _packs(loads: Sequence[Load], num_packs: int, caps: Caps) -> list[Bin] | None:
    return spread(loads, num_packs, caps) or best_packs(loads, num_packs, caps)
