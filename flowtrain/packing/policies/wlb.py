"""`wlb`: rows of long documents wait until there is one for every pack, after WLB-LLM.

1. Queues by tokens: at least T/4, T/2, 3T/4 (T the cap). A long row waits in its queue, beside the window.
2. A queue that holds a row for every pack of a step gives the oldest ones, one to each pack, where they fit.
3. The other rows in order of arrival, as many as fill `FILL` of the step: dearest first into the cheapest pack, if it
   has no room into the emptiest, else they wait for the next step.
4. Packs go to slots by cost.

How long a row may wait is not bounded; when no rows come any more, all queues are emptied. For steps of a given number
of rows a queue gives as many rows as there are ranks. Best settings: the model's cost rather than tokens, three queues.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from flowtrain.packing.balance import fewest_packs
from flowtrain.packing.load import Bin, Bools, Ints, Load
from flowtrain.packing.policies.protocol import Draw, Policy, Slots
from flowtrain.packing.slots import slots_of
from flowtrain.packing.spec import CompositionSpec

NUM_QUEUES = 3
FILL_PERCENT = 98


class WlbQueues(Policy):
    def held(self, spec: CompositionSpec) -> Callable[[Ints], Bools]:
        return lambda tokens: levels(tokens, spec) > 0

    def compose(self, draw: Draw) -> Slots:
        queues: list[list[Load]] = [[] for _ in range(NUM_QUEUES + 1)]
        for load, level in zip(draw.loads, levels(draw.rows.tokens, draw.spec).tolist(), strict=True):
            queues[0 if draw.last else level].append(load)
        packs = _rows(draw, queues) if draw.num_packs is None else _packs(draw, draw.num_packs, queues)
        return slots_of(packs, draw.num_ranks)


def levels(tokens: Ints, spec: CompositionSpec) -> Ints:
    """Number of the queue in which each row waits; 0 for none."""
    return np.minimum((NUM_QUEUES + 1) * tokens // spec.max_tokens, NUM_QUEUES)


def _rows(draw: Draw, queues: Sequence[Sequence[Load]]) -> list[Bin]:
    assert draw.num_rows is not None
    chosen: list[Load] = []
    for queue in reversed(queues[1:]):
        chosen += queue[: len(queue) // draw.num_ranks * draw.num_ranks]
    chosen = chosen[: draw.num_rows]
    chosen += queues[0][: draw.num_rows - len(chosen)]
    return fewest_packs(chosen, draw.num_ranks, draw.caps)


def _packs(draw: Draw, num_packs: int, queues: Sequence[Sequence[Load]]) -> list[Bin]:
    packs = [draw.empty_pack() for _ in range(num_packs)]
    guards = draw.caps.guards
    for queue in reversed(queues[1:]):
        if len(queue) >= num_packs:
            for load in queue[:num_packs]:
                fitting = [n for n in range(num_packs) if (packs[n].room - load.use) & guards == guards]
                if fitting:
                    packs[min(fitting, key=lambda n: (packs[n].cost, n))].add(load)
    left = num_packs * draw.spec.max_tokens * FILL_PERCENT // 100 - sum(pack.tokens for pack in packs)
    ordinary: list[Load] = []
    for load in queues[0]:
        left -= load.tokens
        if left < 0 and ordinary:
            break
        ordinary.append(load)
    cheapest = [(pack.cost, number) for number, pack in enumerate(packs)]
    heapq.heapify(cheapest)
    for load in sorted(ordinary, key=lambda load: (-load.cost, load.position)):
        number = cheapest[0][1]
        if (packs[number].room - load.use) & guards != guards:
            number = max(range(num_packs), key=lambda n: (draw.caps.tokens_left(packs[n]), -n))
            if (packs[number].room - load.use) & guards != guards:
                continue
            packs[number].add(load)
            cheapest = [(pack.cost, n) for n, pack in enumerate(packs)]
            heapq.heapify(cheapest)
            continue
        packs[number].add(load)
        heapq.heapreplace(cheapest, (packs[number].cost, number))
    return packs
