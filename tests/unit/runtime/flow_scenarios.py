"""Runs to be simulated: random steps, slots, packs and units, and segments of exactly the size that was promised."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st

from flowtrain.pool.block import block_bytes
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.types import EncodeUnit, ImageMeta, Pack, Phase, Role, SampleMeta, Step, UnitId


def payload_of(sample: SampleMeta) -> int:
    return sample.vision_tokens * 48


@dataclass(frozen=True)
class Scenario:
    """What is to be run.

    Attributes:
        sizes: `sizes[step][slot][rank]` has the visual tokens of each sample, unit by unit; no units: a text-only pack.
        evals: updates after which an evaluation pass of the same shape runs.
        bad_share: how many of the rows with images are found bad at decode.
        ahead: steps composed before they run.
        shards: producers that encode together.
        slack: cache lines beyond the promised bound in every segment.
        seed: of the dice that decide who works and whose answer arrives.
        exchange: what both sides wait for beside data and room.
        colocated: a rank's packs are encoded by the producer of its process.
        held: packs that a consumer needs before its oldest is done.
        prefill: packs per consumer that are to be ready before the first runs.
    """

    num_producers: int
    shards: int
    num_consumers: int
    trainable: bool
    reduced_roles: frozenset[Role]
    sizes: list[list[list[list[list[int]]]]]
    evals: frozenset[int]
    fixed_in_eval: bool
    bad_share: float
    ahead: int
    slack: int
    seed: int
    exchange: str = "pool"
    colocated: bool = False
    held: int = 1
    prefill: int = 0


@st.composite
def scenarios(draw: st.DrawFn, most_shards: int = 3) -> Scenario:
    num_consumers = draw(st.integers(1, 3))
    unit = st.lists(st.integers(1, 30), min_size=1, max_size=3)
    slot = st.lists(st.lists(unit, max_size=3), min_size=num_consumers, max_size=num_consumers)
    sizes = draw(st.lists(st.lists(slot, min_size=1, max_size=4), min_size=1, max_size=4))
    trainable = draw(st.booleans())
    both = frozenset({Role.PRODUCER, Role.CONSUMER})
    shards = draw(st.integers(1, most_shards))
    return Scenario(
        num_producers=shards * draw(st.integers(1, 3 // shards)),
        shards=shards,
        num_consumers=num_consumers,
        trainable=trainable,
        reduced_roles=draw(st.sampled_from([both, frozenset({Role.PRODUCER})]))
        if trainable
        else frozenset({Role.CONSUMER}),
        sizes=sizes,
        evals=frozenset(draw(st.sets(st.integers(1, len(sizes))))),
        fixed_in_eval=draw(st.booleans()),
        bad_share=draw(st.sampled_from([0.0, 0.2, 1.0])),
        ahead=draw(st.integers(1, 3)),
        slack=draw(st.integers(0, 40)),
        seed=draw(st.integers(0, 2**32)),
        exchange=draw(st.sampled_from(sorted(EXCHANGES))),
        held=draw(st.sampled_from([1, 1, 2, 4])),
        prefill=draw(st.sampled_from([0, 0, 1, 3])),
    )


def steps_of(scenario: Scenario) -> list[Step]:
    """Steps and evaluation passes in the order of need."""
    steps, position = [], 0
    for index, slots in enumerate(scenario.sizes, start=1):
        for phase in (Phase.TRAIN, Phase.EVAL):
            if phase is Phase.EVAL and index not in scenario.evals:
                continue
            fixed = (scenario.trainable and (phase is Phase.TRAIN or scenario.fixed_in_eval)) or scenario.shards > 1
            fixed |= scenario.colocated
            number = 0
            packs = []
            for slot, ranks in enumerate(slots):
                for rank, of_pack in enumerate(ranks):
                    units: list[EncodeUnit] = []
                    samples: list[SampleMeta] = []
                    for number_in_pack, tokens in enumerate(of_pack):
                        of_unit = tuple(
                            SampleMeta.of(
                                position + i, 0, f"row-{position + i}", 4, n, 2, (ImageMeta(8, 8, n, 4 * n, 0),)
                            )
                            for i, n in enumerate(tokens)
                        )
                        position += len(of_unit)
                        samples += of_unit
                        units.append(
                            EncodeUnit(
                                UnitId(phase, index, slot, rank, number_in_pack),
                                of_unit,
                                sum(s.patches for s in of_unit),
                                sum(block_bytes(payload_of(s)) for s in of_unit),
                                (rank if scenario.colocated else number % scenario.num_producers) if fixed else None,
                            )
                        )
                        number += 1
                    samples.append(SampleMeta.of(position, 0, f"row-{position}", 9, 0, 3))
                    position += 1
                    packs.append(Pack(slot, rank, tuple(samples), tuple(units), 1.0, 1.0))
            width = scenario.num_consumers
            starts = range(0, len(packs), width)
            by_slot = tuple(evened(tuple(packs[start : start + width]), phase, index, scenario) for start in starts)
            steps.append(Step(phase, index, by_slot, sum(len(p.samples) for p in packs), 0, {"cursor": position}))
    return steps


def evened(slot: tuple[Pack, ...], phase: Phase, index: int, scenario: Scenario) -> tuple[Pack, ...]:
    """The slot with zero-weight units, so that producers that encode together have as many units each."""
    if scenario.shards == 1:
        return slot
    counts = Counter(unit.producer for pack in slot for unit in pack.units)
    units = list(slot[0].units)
    for producer in range(scenario.num_producers):
        first = producer // scenario.shards * scenario.shards
        most = max(counts[other] for other in range(first, first + scenario.shards))
        for _ in range(most - counts[producer]):
            units.append(EncodeUnit(UnitId(phase, index, slot[0].slot, 0, len(units)), (), 0, 0, producer))
    return (slot[0]._replace(units=tuple(units)), *slot[1:])


def windows(slots: tuple[tuple[Pack, ...], ...], held: int) -> list[tuple[tuple[Pack, ...], ...]]:
    return [slots[start : start + held] for start in range(max(1, len(slots) - held + 1))]


def segments_for(scenario: Scenario, steps: list[Step]) -> dict[int, int]:
    """The promise of composition, and no more: the slots under way in an owner where they are largest, and its largest
    block; the same of a whole step in any owner where whole steps are exchanged."""
    segments = {}
    if EXCHANGES[scenario.exchange].whole_steps:
        of_steps = [[block_bytes(payload_of(s)) for s in step.samples if s.images] for step in steps]
        room = max((sum(blocks) + max(blocks, default=0) for blocks in of_steps), default=0)
        return dict.fromkeys(range(scenario.num_producers), max(room + 64 * scenario.slack, 64))
    for owner in range(scenario.num_producers):
        slots = [
            [unit for slot in under_way for pack in slot for unit in pack.units if unit.producer in (None, owner)]
            for step in steps
            for under_way in windows(step.slots, scenario.held)
        ]
        blocks = [block_bytes(payload_of(s)) for units in slots for unit in units for s in unit.samples]
        largest = max((sum(unit.bytes for unit in units) for units in slots), default=0)
        segments[owner] = max(largest + max(blocks, default=0) + 64 * scenario.slack, 64)
    return segments
