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
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, islice, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import PLACE, Ints, of_columns
from flowtrain.packing.policies import Slots
from flowtrain.packing.spec import CompositionSpec
from flowtrain.packing.table import LoadTable
from flowtrain.types import EncodeUnit, Pack, Phase, UnitId


def build_packs(
    phase: Phase, index: int, rows: LoadTable, slots: Slots, spec: CompositionSpec, cost: CostModel
) -> tuple[tuple[Pack, ...], ...]:
    """Packs by slot and rank, samples in position order, units numbered and given to producers."""
    in_rounds = spec.producer_shards > 1
    fixed_producers = not spec.colocated and (spec.trainable_encoder or in_rounds)
    dealer = Dealer(spec.num_producers, cost.call, in_rounds) if fixed_producers else None
    fixed, sample_at = cost.fixed, rows.samples.__getitem__
    packs: list[tuple[Pack, ...]] = []
    for number, slot in enumerate(slots):
        places_of = [sorted(map(PLACE, pack.loads)) for pack in slot]
        places = np.array(list(chain.from_iterable(places_of)), np.int64)
        # A sample with images takes bytes of the pool, if only for a header; others take none.
        has_images = rows.vision_bytes[places] > 0
        imaged = places[has_images]
        samples = tuple(map(sample_at, imaged.tolist()))
        patches, sizes, works = (
            _sums(column[imaged]).tolist() for column in (rows.patches, rows.vision_bytes, rows.encodes)
        )
        # Of each pack: where it ends among the slot's rows, and among those with images.
        behind = np.cumsum([0, *map(len, places_of)])
        parts = list(pairwise(_sums(has_images)[behind].tolist()))
        ends = [unit_ends(patches, begin, end, spec.max_unit_patches) for begin, end in parts]
        nums = list(map(len, ends))
        cuts = list(pairwise(chain((0,), *ends)))
        ranks = list(chain.from_iterable(map(repeat, range(len(slot)), nums)))
        numbers = chain.from_iterable(map(range, nums))
        ids = of_columns(UnitId, repeat(phase), repeat(index), repeat(number), ranks, numbers)
        producers = ranks if spec.colocated else None
        if dealer is not None:
            producers = dealer.deal([works[end] - works[start] for start, end in cuts])
        units = of_columns(
            EncodeUnit,
            ids,
            [samples[start:end] for start, end in cuts],
            [patches[end] - patches[start] for start, end in cuts],
            [sizes[end] - sizes[start] for start, end in cuts],
            producers or repeat(None),
        )
        units_of = [tuple(islice(units, num)) for num in nums]
        if producers is not None and in_rounds:
            empty = enumerate(_short(producers, spec), start=nums[0])
            units_of[0] += tuple(
                EncodeUnit(UnitId(phase, index, number, 0, place), (), 0, 0, producer) for place, producer in empty
            )
        columns = (
            [tuple(map(sample_at, of_pack)) for of_pack in places_of],
            units_of,
            [pack.cost + fixed if pack.loads else 0 for pack in slot],
            [works[end] - works[begin] for begin, end in parts],
        )
        packs.append(tuple(of_columns(Pack, repeat(number), range(len(slot)), *columns)))
    return tuple(packs)


def _sums(column: npt.NDArray[Any]) -> Ints:
    """Of what stands before each place, and of all."""
    return np.cumsum(np.concatenate(([0], column)))


def unit_ends(sums: Sequence[int], begin: int, behind: int, max_patches: int) -> list[int]:
    """Step 1 for the samples from `begin` up to `behind`: behind which of them a unit ends; a sample larger than
    `max_patches` goes alone. `sums`: patches of all samples before each.

    >>> unit_ends([0, 4, 8, 12, 16, 25], 0, 5, 8), unit_ends([0, 4, 8, 12], 0, 3, 8)
    ([2, 4, 5], [2, 3])
    """
    ends = _ends(sums, begin, behind, max_patches)
    if len(ends) < 2:
        return ends
    even = -(-(sums[behind] - sums[begin]) // len(ends))
    for part in range(4):
        most = even + (max_patches - even) * part // 4
        if even < max_patches and len(tried := _ends(sums, begin, behind, most)) == len(ends):
            return tried
    return ends


def _ends(sums: Sequence[int], begin: int, behind: int, most: int) -> list[int]:
    """In order, a unit is closed when the next sample would take it past `most`."""
    ends: list[int] = []
    while begin < behind:
        begin = max(begin + 1, bisect_right(sums, sums[begin] + most, begin, behind + 1) - 1)
        ends.append(begin)
    return ends


class Dealer:
    """Step 2, slot after slot of a step; `call`: what an encoder call costs beside its samples.

    `in_rounds`: no producer gets another unit of a slot before every one has as many (step 3).
    """

    def __init__(self, num_producers: int, call: int, in_rounds: bool = False) -> None:
        self.call = call
        self.at_once = num_producers if in_rounds else 1
        self._least = [(0, producer) for producer in range(num_producers)]

    def deal(self, works: Sequence[int]) -> list[int]:
        """Producers of the units of the next slot, in the order of need.

        >>> Dealer(2, call=0).deal([3, 4, 5, 1]), Dealer(2, call=0, in_rounds=True).deal([9, 1, 1, 1])
        ([1, 1, 0, 0], [0, 1, 1, 0])
        """
        dealt = [0] * len(works)
        order = sorted(range(len(works)), key=works.__getitem__, reverse=True)
        for start in range(0, len(order), self.at_once):
            units = order[start : start + self.at_once]
            taken = [heapq.heappop(self._least) for _ in units]
            for unit, (so_far, producer) in zip(units, taken, strict=True):
                dealt[unit] = producer
                heapq.heappush(self._least, (so_far + works[unit] + self.call, producer))
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
