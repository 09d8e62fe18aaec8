"""How long work takes: the border between what is played and where its seconds come from (pure).

`DeviceTiming` (`device_timing.py`) has them from the allocator's throughput model of a named device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.types import Role, Step, UnitId


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of the work of one step, undisturbed.

    Attributes:
        encode: of each unit; `backward` the same of its backward (0 where no gradient returns).
        packs: `packs[slot][rank]`, forward and backward.
        fill: of a pipeline, before its first pack of the step is done and behind that pack's own seconds, by rank.
        flops: needed by the whole step (contract C13); None where nobody counts them.
    """

    encode: Mapping[UnitId, float]
    backward: Mapping[UnitId, float]
    packs: list[list[float]]
    fill: list[float]
    flops: float | None = None


class Timing(Protocol):
    """Seconds by what a run is made of; the same step always takes the same."""

    def of(self, step: Step) -> StepSeconds:
        """Of all units and packs of a step."""

    def reduce_seconds(self, role: Role) -> float:
        """Of the reduction of a step's gradients over a side, beyond what the last pack hides."""

    def update_seconds(self, role: Role) -> float:
        """Of the optimizer on each rank of a side."""
