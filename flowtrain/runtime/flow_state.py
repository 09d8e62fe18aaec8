"""What `flow` keeps of a step and of a pack until they are done, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowtrain.pool.directory import Expired
from flowtrain.types import EmbeddingRef, Pack, Phase, Role, SkippedRow, Step, UnitId

StepKey = tuple[Phase, int]


@dataclass(slots=True)
class StepState:
    """What is left to do of one step."""

    step: Step
    packs_left: int
    units_left: int
    units_to_encode: int
    begun: bool = False
    reduce_sent: set[tuple[Role, int]] = field(default_factory=set)
    bad: dict[int, SkippedRow] = field(default_factory=dict)


@dataclass(slots=True)
class PackState:
    """A pack, the units that it waits for, and the features that are there, by position."""

    pack: Pack
    key: StepKey
    missing: set[UnitId]
    refs: dict[int, EmbeddingRef] = field(default_factory=dict)


def missing_text(rank: int, pack: PackState, owner: Mapping[UnitId, int]) -> str:
    """Whose units the pack of a consumer waits for; nothing where it waits for none."""
    if not pack.missing:
        return ""
    owners = sorted({owner[unit] for unit in pack.missing if unit in owner})
    whose = f"of producer {', '.join(map(str, owners))}" if owners else "not yet sent to a producer"
    return f"consumer {rank} waits for units {whose}"


def busy_text(in_flight: Mapping[str, Sequence[int]]) -> str:
    """Ranks with orders in flight, by kind of order: `producer (backward)` → their number for each rank."""
    busy = [
        " ".join((name, str(rank), *kind))
        for role, numbers in in_flight.items()
        for name, *kind in [role.split()]
        for rank, number in enumerate(numbers)
        if number
    ]
    return "in flight: " + (", ".join(busy) or "nothing")


def expired_text(role: Role, rank: int, expired: Expired) -> str | None:
    """What a process that died leaves in the pool; None where it had no lease."""
    if not any(expired):
        return None
    return (
        f"{role} {rank} had leased blocks of the pool: features of {len(expired.readable)} samples can be read by "
        f"others, {len(expired.lost)} may hold half a gradient"
    )
