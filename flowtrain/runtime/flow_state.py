"""What `flow` keeps of a step and of a pack until they are done."""

from __future__ import annotations

from dataclasses import dataclass, field

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
