"""Packs with their encode units: whole samples of a pack, in order, that share one encoder call.

1. Samples with images, in order, are cut into as few units of at most `max_unit_patches` as they fill, of nearly equal
   size where an even cut does not take more. Rows of a pack may share a unit; a sample never has two.
2. Trainable encoder: each unit has its producer. Slot by slot, in the order of need, the dearest unit goes to the
   producer with the least predicted work so far (`deal`), which ends more evenly than dealing in order. A frozen
   encoder leaves the choice to the flow.

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
POSITION = itemgetter(Load._fields.index("position"))


def build_packs(
    phase: Phase, index: int, slots: Slots, spec: CompositionSpec, cost: CostModel
) -> tuple[tuple[Pack, ...], ...]:
    """Packs by slot and rank, samples in position order, units numbered and given to producers."""
    ordered = [[sorted(pack.loads, key=POSITION) for pack in slot] for slot in slots]
    groups = [[group_loads(loads, spec.max_unit_patches) for loads in slot] for slot in ordered]
    producers = deal(groups, spec.num_producers, cost.call) if spec.trainable_encoder else None
    padded = _padded(slots, spec)
    packs = []
    for number, (slot, loads_of, groups_of) in enumerate(zip(slots, ordered, groups, strict=True)):
        row = []
        for rank, (pack, loads, parts) in enumerate(zip(slot, loads_of, groups_of, strict=True)):
            dealt: Sequence[int | None] = [None] * len(parts) if producers is None else producers[number][rank]
            units = tuple(
                EncodeUnit(
                    id=UnitId(phase, index, number, rank, place),
                    samples=tuple([load.sample for load in part]),
                    patches=sum([load.patches for load in part]),
                    bytes=sum([load.vision_bytes for load in part]),
                    producer=producer,
                )
                for place, (part, producer) in enumerate(zip(parts, dealt, strict=True))
            )
            samples = tuple([load.sample for load in loads])
            total = pack.cost + cost.fixed if loads else 0
            row.append(Pack(number, rank, samples, units, total, pack.encode, padded[number][rank]))
        packs.append(tuple(row))
    return tuple(packs)


def group_loads(loads: Sequence[Load], max_patches: int) -> list[Group]:
    """Step 1; a sample larger than `max_patches` goes alone."""
    # A sample with images takes bytes of the pool, if only for a header; others take none.
    imaged = [load for load in loads if load.vision_bytes]
    groups = _cut(imaged, max_patches)
    if len(groups) < 2:
        return groups
    even = -(-sum([load.patches for load in imaged]) // len(groups))
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
        if patches + load.patches > most or not groups:
            groups.append([])
            patches = 0
        groups[-1].append(load)
        patches += load.patches
    return groups


def deal(groups: Sequence[Sequence[Sequence[Group]]], num_producers: int, call: int) -> list[list[list[int]]]:
    """Step 2: `result[slot][rank][unit]` is a producer; `call` is the fixed cost of an encoder call.

    >>> deal([[[[], []], [[]]]], 1, 0)
    [[[0, 0], [0]]]
    """
    least = [(0, producer) for producer in range(num_producers)]
    dealt: list[list[list[int]]] = []
    for slot in groups:
        dealt.append([[0] * len(parts) for parts in slot])
        units = [
            (-sum([load.encode for load in part]) - call, rank, place)
            for rank, parts in enumerate(slot)
            for place, part in enumerate(parts)
        ]
        for work, rank, place in sorted(units):
            so_far, producer = least[0]
            dealt[-1][rank][place] = producer
            heapq.heapreplace(least, (so_far - work, producer))
    return dealt


def _padded(slots: Slots, spec: CompositionSpec) -> list[list[int]]:
    """Length to which each pack is padded: with pipeline stages the same for all packs of the step."""
    rounded = [[-(-pack.tokens // spec.pad_tokens) * spec.pad_tokens for pack in slot] for slot in slots]
    if spec.sync != "beat":
        return rounded
    most = max(chain.from_iterable(rounded), default=0)
    return [[most] * len(slot) for slot in rounded]
