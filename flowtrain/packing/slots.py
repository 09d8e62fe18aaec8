"""Packs into slots and ranks, and slots into the order in which they run.

1. `slots_of`: packs sorted by cost, a slot is the next R of them (this makes the sum over slots of the dearest pack as
   small as it can be for these packs); within a slot the dearest goes to the rank with the least so far.
2. `johnson`: slots that encode faster than they train come first, least encoding first; then the others, least
   training last. This order makes a two-stage flow shop end earliest: text-heavy packs hide the encoder's start-up.
3. `overlap_order`: with a trainable encoder the gradients of a slot's images go back to the encoder after the slot has
   been trained, so text-heavy slots must hide the encoder's end as well as its start. `makespan` plays a step through;
   Johnson's order with more and more of its text-heavy slots moved to the end, and of few slots insertion (one after
   the other to where it costs least), compete; the earliest end wins.

Ties fall by position, so equal inputs give equal slots. The order of slots never changes what a step holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flowtrain.packing.load import Bin

MOST_INSERTED = 8
"""Slots up to which insertion is tried: it plays n³ slots through, and of more it finds nothing better."""

PARTS = 8
"""Of the text-heavy slots, none to all of which are tried at the end."""

Stage = tuple[int, int]
"""Time of a slot on the encoder's and on the backbone's side."""


def slots_of(bins: Sequence[Bin], num_ranks: int) -> list[list[Bin]]:
    """`result[slot][rank]`."""
    assert len(bins) % num_ranks == 0, f"{len(bins)} packs for {num_ranks} ranks"
    ordered = sorted(bins, key=lambda pack: (-pack.cost, pack.first_position))
    so_far = [0] * num_ranks
    slots = []
    for start in range(0, len(ordered), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (so_far[rank], rank))
        slot = ordered[start : start + num_ranks]
        for rank, pack in zip(ranks, ordered[start : start + num_ranks], strict=True):
            slot[rank] = pack
            so_far[rank] += pack.cost
        slots.append(slot)
    return slots


def ordered_slots(slots: list[list[Bin]], drains: bool) -> list[list[Bin]]:
    """Slots in the order in which they run; `drains`: gradients go back to the encoder.

    Encoders are taken to be as many as the backbone's ranks: their real number must not change the order (C1).
    """
    if len(slots) < 2:
        return slots
    stages = [(sum(pack.encode for pack in slot) // len(slot), max(pack.cost for pack in slot)) for slot in slots]
    order = overlap_order(stages) if drains else johnson(stages)
    return [slots[number] for number in order]


def johnson(stages: Sequence[Stage]) -> list[int]:
    """The order of jobs, each given by its time on the first and on the second stage.

    >>> johnson([(3, 1), (1, 2), (0, 5)])
    [2, 1, 0]
    """
    return [*itertools.chain.from_iterable(_rising_and_falling(stages))]


def _rising_and_falling(stages: Sequence[Stage]) -> tuple[list[int], list[int]]:
    """Jobs whose second stage is longer, least first stage first; and the others, least second stage last."""
    first = sorted((a, n) for n, (a, b) in enumerate(stages) if a < b)
    second = sorted((-b, n) for n, (a, b) in enumerate(stages) if a >= b)
    return [n for _, n in first], [n for _, n in second]


def overlap_order(stages: Sequence[Stage]) -> list[int]:
    """The order in which a step with returning gradients ends earliest, of those tried."""
    rising, falling = _rising_and_falling(stages)
    orders = []
    for part in range(PARTS + 1):
        # Evenly among them: both ends need slots that are little work for the encoder.
        last = [job for n, job in enumerate(rising) if (n + 1) * part // PARTS > n * part // PARTS]
        moved = set(last)
        orders.append([*(job for job in rising if job not in moved), *falling, *reversed(last)])
    if len(stages) <= MOST_INSERTED:
        orders.append(_inserted(stages))
    return min(orders, key=lambda order: makespan(stages, order))


def _inserted(stages: Sequence[Stage]) -> list[int]:
    inserted: list[int] = []
    for job in sorted(range(len(stages)), key=lambda n: (-sum(stages[n]), n)):
        orders = [[*inserted[:place], job, *inserted[place:]] for place in range(len(inserted) + 1)]
        inserted = min(orders, key=lambda order: makespan(stages, order))
    return inserted


def makespan(stages: Sequence[Stage], order: Sequence[int]) -> int:
    """When the last gradient is through: encode costs one third of the encoder's time of a slot (forward), its return
    two thirds (backward). Encoders do what is needed first: all forwards, then each backward when its slot is trained.
    """
    encoded = trained = 0
    ends = []
    for number in order:
        both, train = stages[number]
        encoded += both // 3
        trained = max(encoded, trained) + train
        ends.append((trained, both - both // 3))
    returned = encoded
    for end, backward in ends:
        returned = max(returned, end) + backward
    return max(returned, trained)
