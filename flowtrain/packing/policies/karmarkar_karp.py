"""`karmarkar_karp`: equal-cost parts by differencing, over the ranks and then over each rank's packs, as verl does.

1. The rows of the step: the next `num_rows`, or the next that fill `FILL` of the step's packs.
2. Parts of equal cost over the ranks, then each rank's rows into its packs (every rank has as many as the one that
   needs most).
3. Differencing knows no cap. Where a pack is over one: a pack more for every rank, or, when their number is given, the
   newest rows are left for the next step, 3 % at a time.

Differencing keeps, for each part of the rows, `num_parts` sums in falling order; the two parts with the largest spread
are joined, largest sum to smallest, until one is left. Best settings: the model's cost rather than tokens, any number
of rows a rank, 97 % of the tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from flowtrain.packing.load import Bin, Caps, Load
from flowtrain.packing.policies.protocol import Draw, Policy, Slots
from flowtrain.packing.slots import slots_of

FILL_PERCENT = 97


class KarmarkarKarp(Policy):
    def compose(self, draw: Draw) -> Slots:
        ranks = draw.num_ranks
        if draw.num_packs is None:
            loads: Sequence[Load] = draw.loads[: draw.num_rows]
            num_slots = max(1, -(-draw.caps.fewest_packs(loads) // ranks))
            while (packs := _two_levels(loads, ranks, num_slots, draw.caps)) is None:
                num_slots += 1
        else:
            loads = _prefix(draw, draw.num_packs)
            while (packs := _two_levels(loads, ranks, draw.num_packs // ranks, draw.caps)) is None:
                loads = loads[: min(len(loads) - 1, len(loads) * 97 // 100)]
        return slots_of(packs, ranks)


def _prefix(draw: Draw, num_packs: int) -> Sequence[Load]:
    left = num_packs * draw.spec.max_tokens * FILL_PERCENT // 100
    for number, load in enumerate(draw.loads):
        left -= load.tokens
        if left < 0:
            return draw.loads[: max(1, number)]
    return draw.loads


def _two_levels(loads: Sequence[Load], num_ranks: int, num_slots: int, caps: Caps) -> list[Bin] | None:
    """Packs of all rows, or None when one is over a cap. Rows each in a pack of its own end every retry."""
    if len(loads) <= num_ranks * num_slots:
        groups = [[load] for load in loads] + [[] for _ in range(num_ranks * num_slots - len(loads))]
    else:
        groups = [
            group
            for rank in partition(loads, num_ranks)
            for group in (partition(rank, num_slots) if num_slots > 1 else [rank])
        ]
    packs = []
    for group in groups:
        pack = Bin(caps.room)
        for load in group:
            if (pack.room - load.use) & caps.guards != caps.guards:
                return None
            pack.add(load)
        packs.append(pack)
    return packs


def partition(loads: Sequence[Load], num_parts: int) -> list[list[Load]]:
    """`num_parts` groups of nearly equal cost."""
    if len(loads) <= num_parts:
        return [[load] for load in loads] + [[] for _ in range(num_parts - len(loads))]
    sums: list[np.ndarray] = []
    joins: list[tuple[int, int, np.ndarray]] = []
    heap: list[tuple[int, int]] = []
    for number, load in enumerate(loads):
        start = np.zeros(num_parts, np.int64)
        start[0] = load.cost
        sums.append(start)
        heap.append((-load.cost, number))
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        raw = sums[one] + sums[other][::-1]
        order = np.argsort(-raw, kind="stable")
        joined = raw[order]
        joins.append((one, other, order))
        sums.append(joined)
        heapq.heappush(heap, (int(joined[-1] - joined[0]), len(sums) - 1))
    part_of: dict[int, np.ndarray] = {len(sums) - 1: np.arange(num_parts)}
    for number in range(len(sums) - 1, len(loads) - 1, -1):
        one, other, order = joins[number - len(loads)]
        parts = np.empty(num_parts, np.int64)
        parts[order] = part_of.pop(number)
        part_of[one], part_of[other] = parts, parts[::-1]
    groups: list[list[Load]] = [[] for _ in range(num_parts)]
    for number, load in enumerate(loads):
        groups[int(part_of[number][0])].append(load)
    return groups
