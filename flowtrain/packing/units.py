"""Packs with their encode units: whole samples of a pack, in order, that share one encoder call.

A unit is closed when the next sample would take it past `max_unit_patches`. For a trainable encoder each unit goes to
the producer with the least predicted work so far, in the order of need; a frozen encoder leaves the choice to the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from flowtrain.packing.cost import CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import EncodeUnit, Pack, Phase, SampleMeta, UnitId


def build_packs(
    phase: Phase, index: int, slots: Sequence[Sequence[Sequence[SampleMeta]]], spec: CompositionSpec, cost: CostModel
) -> tuple[tuple[Pack, ...], ...]:
    """Packs by slot and rank, their units numbered and given to producers."""
    load = [0] * spec.num_producers

    def unit_of(slot: int, rank: int, number: int, samples: Sequence[SampleMeta]) -> EncodeUnit:
        producer = None
        if spec.trainable_encoder:
            producer = min(range(spec.num_producers), key=lambda rank: (load[rank], rank))
            load[producer] += cost.encode_cost(samples)
        return EncodeUnit(
            id=UnitId(phase, index, slot, rank, number),
            samples=tuple(samples),
            patches=sum(sample.patches for sample in samples),
            bytes=sum(spec.block_bytes(sample) for sample in samples),
            producer=producer,
        )

    def pack_of(slot: int, rank: int, samples: Sequence[SampleMeta]) -> Pack:
        groups = group_samples(samples, spec.max_unit_patches)
        units = tuple(unit_of(slot, rank, number, group) for number, group in enumerate(groups))
        return Pack(slot, rank, tuple(samples), units, cost.pack_cost(samples), cost.encode_cost(samples))

    packs = tuple(
        tuple(pack_of(slot, rank, samples) for rank, samples in enumerate(ranks)) for slot, ranks in enumerate(slots)
    )
    for pack in chain.from_iterable(packs):
        encoded = [sample for unit in pack.units for sample in unit.samples]
        assert encoded == [sample for sample in pack.samples if sample.images], "units and images of a pack differ"
    return packs


def group_samples(samples: Sequence[SampleMeta], max_patches: int) -> list[list[SampleMeta]]:
    """Samples with images, in order, in groups of at most `max_patches` (a larger one alone)."""
    groups: list[list[SampleMeta]] = []
    patches = 0
    for sample in samples:
        if not sample.images:
            continue
        if not groups or patches + sample.patches > max_patches:
            groups.append([])
            patches = 0
        groups[-1].append(sample)
        patches += sample.patches
    return groups
