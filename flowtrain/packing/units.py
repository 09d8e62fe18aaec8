"""Packs with their encode units: whole samples of a pack, in order, that share one encoder call.

1. Samples with images, in order, are cut into as few units of at most `max_unit_patches` as they fill, of nearly equal
   size where an even cut does not take more. Rows of a pack may share a unit; a sample never has two.
2. Trainable encoder: each unit has its producer. Slot by slot, in the order of need, the dearest unit goes to the
   producer with the least predicted work so far (`deal`), which ends more evenly than dealing in order. A frozen
   encoder leaves the choice to the flow.
3. Producers that share an encoder's parameters run unit by unit together: a slot's units are dealt in rounds of one for
   each producer, frozen encoder or not, and those who have fewer than others of their group get zero-weight units,
   without a sample, which the slot's first pack waits for.

An encoder call keeps images and windows apart, so what shares a unit changes no feature.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import Load
from flowtrain.packing.policies import Slots
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import EncodeUnit, Pack, Phase, UnitId

Group = list[Load]
POSITION, ENCODE, PATCHES, VISION_BYTES, SAMPLE = (
    itemgetter(Load._fields.index(name)) for name in ("position", "encode", "patches", "vision_bytes", "sample")
)


def build_packs(
    phase: Phase, index: int, slots: Slots, spec: CompositionSpec, cost: CostModel
) -> tuple[tuple[Pack, ...], ...]:
    """Packs by slot and rank, samples in position order, units numbered and given to producers."""
    ordered = [[sorted(pack.loads, key=POSITION) for pack in slot] for slot in slots]
    most = spec.max_unit_patches
    # A sample with images takes bytes of the pool, if only for a header; others take none.
    groups = [[group_loads(list(filter(VISION_BYTES, loads)), most) for loads in slot] for slot in ordered]
    fixed_producers = spec.trainable_encoder or spec.producer_shards > 1
    producers = deal(groups, spec.num_producers, cost.call, spec.producer_shards > 1) if fixed_producers else None
    padded, fixed = _padded(slots, spec), cost.fixed
    packs = []
    for number, (slot, loads_of, groups_of) in enumerate(zip(slots, ordered, groups, strict=True)):
        row = []
        for rank, (pack, loads, parts) in enumerate(zip(slot, loads_of, groups_of, strict=True)):
            dealt = producers[number][rank] if producers is not None else None
            units = []
            for place, part in enumerate(parts):
                units.append(
                    EncodeUnit(
                        UnitId(phase, index, number, rank, place),
                        tuple(map(SAMPLE, part)),
                        sum(map(PATCHES, part)),
                        sum(map(VISION_BYTES, part)),
                        dealt[place] if dealt is not None else None,
                    )
                )
            if rank == 0 and producers is not None and spec.producer_shards > 1:
                for producer in _short(producers[number], spec):
                    units.append(EncodeUnit(UnitId(phase, index, number, rank, len(units)), (), 0, 0, producer))
            samples = tuple(map(SAMPLE, loads))
            total, encode = pack.cost + fixed if loads else 0, sum(map(ENCODE, loads))
            row.append(Pack(number, rank, samples, tuple(units), total, encode, padded[number][rank]))
        packs.append(tuple(row))
    return tuple(packs)


def group_loads(imaged: Sequence[Load], max_patches: int) -> list[Group]:
    """Step 1, of samples with images; a sample larger than `max_patches` goes alone."""
    groups = _cut(imaged, max_patches)
    if len(groups) < 2:
        return groups
    even = -(-sum(map(PATCHES, imaged)) // len(groups))
    for part in range(4):
        most = even + (max_patches - even) * part // 4
        if even < max_patches and len(tried := _cut(imaged, most)) == len(groups):
            return tried
    return groups


def _cut(loads: Sequence[Load], most: int) -> list[Group]:
    """In order, a unit is closed when the next sample would take it past `most`."""
    groups: list[Group] = []
    patches = most
    for load in loads:
        patches += load.patches
        if patches > most or not groups:
            group = [load]
            groups.append(group)
            patches = load.patches
        else:
            group.append(load)
    return groups


def deal(
    groups: Sequence[Sequence[Sequence[Group]]], num_producers: int, call: int, in_rounds: bool = False
) -> list[list[list[int]]]:
    """Step 2: `result[slot][rank][unit]` is a producer; `call` is the fixed cost of an encoder call.

    `in_rounds`: no producer gets another unit of a slot before every one has as many (step 3).

    >>> deal([[[[], []], [[]]]], 1, 0)
    [[[0, 0], [0]]]
    """
    least = [(0, producer) for producer in range(num_producers)]
    dealt: list[list[list[int]]] = []
    for slot in groups:
        dealt.append([[0] * len(parts) for parts in slot])
        units = [
            (-sum(map(ENCODE, part)) - call, rank, place)
            for rank, parts in enumerate(slot)
            for place, part in enumerate(parts)
        ]
        units.sort()
        for start in range(0, len(units), num_producers if in_rounds else 1):
            chunk = units[start : start + (num_producers if in_rounds else 1)]
            taken = [heapq.heappop(least) for _ in chunk]
            for (work, rank, place), (so_far, producer) in zip(chunk, taken, strict=True):
                dealt[-1][rank][place] = producer
                heapq.heappush(least, (so_far - work, producer))
    return dealt


def _short(dealt: Sequence[Sequence[int]], spec: CompositionSpec) -> list[int]:
    """The producers that lack units of a slot to have as many as the others of their group, once for each."""
    counts = [0] * spec.num_producers
    for producer in chain.from_iterable(dealt):
        counts[producer] += 1
    short = []
    for first in range(0, spec.num_producers, spec.producer_shards):
        group = range(first, first + spec.producer_shards)
        most = max(counts[producer] for producer in group)
        short += [producer for producer in group for _ in range(most - counts[producer])]
    return short


def _padded(slots: Slots, spec: CompositionSpec) -> list[list[int]]:
    """Length to which each pack is padded: with pipeline stages the same for all packs of the step."""
    rounded = [[-(-pack.tokens // spec.pad_tokens) * spec.pad_tokens for pack in slot] for slot in slots]
    if spec.sync != "beat":
        return rounded
    most = max(chain.from_iterable(rounded), default=0)
    return [[most] * len(slot) for slot in rounded]
