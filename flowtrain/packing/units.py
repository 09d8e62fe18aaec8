"""Packs with their encode units: whole samples of a pack, in order, that share one encoder call.

1. Samples with images, in order, are cut into as few units of at most `max_unit_patches` as they fill, of nearly equal
   size where an even cut does not take more. Rows of a pack may share a unit; a sample never has two.
2. Trainable encoder: each unit has its producer. Slot by slot, in the order of need, the dearest unit goes to the
   producer with the least predicted work so far (`deal`), which ends more evenly than dealing in order. A frozen
   encoder leaves the choice to the flow.
3. Producers that share an encoder's parameters run unit by unit together: a slot's units are dealt in rounds of one for
   each producer, frozen encoder or not, and those who have fewer than others of their group get zero-weight units,
   without a sample, which the slot's first pack waits for.
4. Colocated: the units of a rank's packs are its own producer's, whose process is the rank's.

An encoder call keeps images and windows apart, so what shares a unit changes no feature.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import PLACE, Ints, of_columns
from flowtrain.packing.policies import Slots
from flowtrain.packing.spec import CompositionSpec
from flowtrain.packing.table import LoadTable
from flowtrain.types import EncodeUnit, Pack, Phase, UnitId

Value = TypeVar("Value")


def build_packs(
    phase: Phase, index: int, rows: LoadTable, slots: Slots, spec: CompositionSpec, cost: CostModel
) -> tuple[tuple[Pack, ...], ...]:
    """Packs by slot and rank, samples in position order, units numbered and given to producers."""
    if not slots:
        return ()
    ranks, bins = len(slots[0]), list(chain.from_iterable(slots))
    places_of = [sorted(map(PLACE, pack.loads)) for pack in bins]
    places = np.array(list(chain.from_iterable(places_of)), np.int64)
    # A sample with images takes bytes of the pool, if only for a header; others take none.
    has_images = rows.vision_bytes[places] > 0
    imaged = rows.at(places[has_images])
    # Where each pack begins and ends among the rows with images.
    borders = _sums(has_images)[_sums(np.array(list(map(len, places_of))))]
    packs = of_columns(
        Pack,
        chain.from_iterable(repeat(number, ranks) for number in range(len(slots))),
        cycle(range(ranks)),
        [tuple(map(rows.samples.__getitem__, of_pack)) for of_pack in places_of],
        _units(phase, index, imaged, borders, ranks, spec, cost),
        [pack.cost + cost.fixed if pack.loads else 0 for pack in bins],
        np.diff(_sums(imaged.encodes)[borders]).tolist(),
    )
    return tuple(tuple(islice(packs, ranks)) for _ in slots)


def _units(
    phase: Phase, index: int, rows: LoadTable, borders: Ints, ranks: int, spec: CompositionSpec, cost: CostModel
) -> list[tuple[EncodeUnit, ...]]:
    """The units of each pack; `rows`: those with images, pack after pack, which begin and end at the borders."""
    patches, sizes, works = map(_sums, (rows.patches, rows.vision_bytes, rows.encodes))
    ends, nums = unit_ends(patches, borders[:-1], borders[1:], spec.max_unit_patches)
    starts = np.concatenate((borders[:1], ends))[:-1]
    slots, of_rank = np.divmod(np.repeat(np.arange(len(nums)), nums), ranks)
    numbers = np.arange(len(ends)) - np.repeat(np.cumsum(nums) - nums, nums)
    of_slot = np.bincount(slots, minlength=len(nums) // ranks).tolist()
    producers = None
    if spec.colocated:
        producers = _cut(of_rank.tolist(), of_slot)
    elif spec.trainable_encoder or spec.producer_shards > 1:
        dealer = Dealer(spec.num_producers, cost.call, in_rounds=spec.producer_shards > 1)
        producers = [dealer.deal(of) for of in _cut((works[ends] - works[starts]).tolist(), of_slot)]
    samples = tuple(rows.samples)
    ids = of_columns(UnitId, repeat(phase), repeat(index), slots.tolist(), of_rank.tolist(), numbers.tolist())
    units = of_columns(
        EncodeUnit,
        ids,
        [samples[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)],
        (patches[ends] - patches[starts]).tolist(),
        (sizes[ends] - sizes[starts]).tolist(),
        repeat(None) if producers is None else chain.from_iterable(producers),
    )
    found = [tuple(of_pack) for of_pack in _cut(units, nums.tolist())]
    if producers is not None and spec.producer_shards > 1:
        for slot, dealt in enumerate(producers):
            empty = enumerate(_short(dealt, spec), start=len(found[slot * ranks]))
            found[slot * ranks] += tuple(
                EncodeUnit(UnitId(phase, index, slot, 0, number), (), 0, 0, producer) for number, producer in empty
            )
    return found


def _cut(values: Iterable[Value], nums: Sequence[int]) -> list[list[Value]]:
    """Parts of so many values, one after the other."""
    left = iter(values)
    return [list(islice(left, num)) for num in nums]


def _sums(column: npt.NDArray[Any]) -> Ints:
    """Of what stands before each place, and of all."""
    return np.cumsum(np.concatenate(([0], column)))


def unit_ends(sums: Ints, begins: Ints, behinds: Ints, max_patches: int) -> tuple[Ints, Ints]:
    """Step 1 for packs of the samples from `begins` up to `behinds`: behind which samples units end, pack after pack,
    and how many units each pack has; a sample larger than `max_patches` goes alone. `sums`: patches of all samples
    before each.

    >>> unit_ends(np.array([0, 4, 8, 12, 16, 25]), np.array([0, 3]), np.array([3, 5]), 8)
    (array([2, 3, 4, 5]), array([2, 2]))
    """
    rounds = []
    for at in _ends(sums, begins, behinds, np.full(len(begins), max_patches)):
        rounds.append(at)
        if (at == behinds).all():
            break
    ends = np.array(rounds)
    nums = (begins < behinds) + np.count_nonzero(ends < behinds, axis=0)
    evens = -(-(sums[behinds] - sums[begins]) // np.maximum(nums, 1))
    left = np.flatnonzero((nums > 1) & (evens < max_patches))
    for part in range(4):
        if not len(left):
            break
        most = evens[left] + (max_patches - evens[left]) * part // 4
        tried = np.array(list(islice(_ends(sums, begins[left], behinds[left], most), len(ends))))
        as_few = tried[nums[left] - 1, np.arange(len(left))] == behinds[left]
        ends[:, left[as_few]] = tried[:, as_few]
        left = left[~as_few]
    return ends.T[np.arange(len(ends)) < nums[:, None]], nums


def _ends(sums: Ints, at: Ints, behinds: Ints, most: Ints) -> Iterator[Ints]:
    """The next end of each pack: in order, a unit is closed when the next sample would take it past `most`."""
    while True:
        at = np.minimum(np.maximum(np.searchsorted(sums, sums[at] + most, "right") - 1, at + 1), behinds)
        yield at


class Dealer:
    """Step 2, slot after slot of a step; `call`: what an encoder call costs beside its samples.

    `in_rounds`: no producer gets another unit of a slot before every one has as many (step 3).
    """

    def __init__(self, num_producers: int, call: int, in_rounds: bool = False) -> None:
        self.call, self.in_rounds = call, in_rounds
        self._least = [(0, producer) for producer in range(num_producers)]

    def deal(self, works: Sequence[int]) -> list[int]:
        """Producers of the units of the next slot, in the order of need.

        >>> Dealer(2, call=0).deal([3, 4, 5, 1]), Dealer(2, call=0, in_rounds=True).deal([9, 1, 1, 1])
        ([1, 1, 0, 0], [0, 1, 1, 0])
        """
        dealt, least = [0] * len(works), self._least
        order = sorted(range(len(works)), key=works.__getitem__, reverse=True)
        if not self.in_rounds:
            for unit in order:
                so_far, dealt[unit] = least[0]
                heapq.heapreplace(least, (so_far + works[unit] + self.call, dealt[unit]))
            return dealt
        for start in range(0, len(order), len(least)):
            units = order[start : start + len(least)]
            taken = [heapq.heappop(least) for _ in units]
            for unit, (so_far, producer) in zip(units, taken, strict=True):
                dealt[unit] = producer
                heapq.heappush(least, (so_far + works[unit] + self.call, producer))
        return dealt


def _short(dealt: Sequence[int], spec: CompositionSpec) -> list[int]:
    """The producers that lack units of a slot to have as many as the others of their group, once for each."""
    counts = [0] * spec.num_producers
    for producer in dealt:
        counts[producer] += 1
    short = []
    for first in range(0, spec.num_producers, spec.producer_shards):
        group = range(first, first + spec.producer_shards)
        most = max(counts[producer] for producer in group)
        short += [producer for producer in group for _ in range(most - counts[producer])]
    return short
