"""Rounds: the units that producers encode together (pure, contract C10).

Producers that each hold a piece of the encoder are a *group*: they encode a round together, one unit each, and run its
backwards together, since each call of the encoder is a collective of theirs. Otherwise a producer is its own group, and
a round is a unit.

Invariants: a round's units are of one slot, so that a pool with room for a slot has room for each of its rounds; rounds
come in the order of need of their first units, slot by slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowtrain.runtime.flow_state import StepKey
from flowtrain.types import EncodeUnit, Step


@dataclass(frozen=True, slots=True)
class Round:
    """Units that the producers of a group encode together, by their place in it. `group` None: any may take it."""

    key: StepKey
    units: tuple[EncodeUnit, ...]
    group: int | None


def ranks_of(group: int, shards: int) -> range:
    """The producers of a group."""
    return range(group * shards, (group + 1) * shards)


def rounds_of(step: Step, num_producers: int, shards: int) -> Iterator[Round]:
    """The rounds of a step; `shards`: producers of a group, each of whom composition gives as many units of a slot."""
    key = (step.phase, step.index)
    if shards == 1:
        yield from (Round(key, (unit,), unit.producer) for pack in step.packs for unit in pack.units)
        return
    for slot in step.slots:
        of_rank: list[list[EncodeUnit]] = [[] for _ in range(num_producers)]
        for pack in slot:
            for unit in pack.units:
                assert unit.producer is not None, f"unit {unit.id} has no producer, and producers work in groups"
                of_rank[unit.producer].append(unit)
        for group in range(num_producers // shards):
            members = of_rank[group * shards : (group + 1) * shards]
            yield from (Round(key, units, group) for units in zip(*members, strict=True))
