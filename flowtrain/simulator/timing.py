"""How long work takes: the border between what is played and where its seconds come from (pure).

| implementation | seconds from |
|---|---|
| `DeviceTiming` (`device_timing.py`) | the allocator's throughput model of a named device |
| `ProfileTiming` | what `flowtrain profile` measured |
| `CostTiming` | a cost model in seconds, as a run with `packing.cost: fitted` finds it |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.allocator.profile import Part, Profile
from flowtrain.packing import CostModel
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


@dataclass(frozen=True, slots=True)
class CostTiming:
    """Seconds by cost models: `encode_cost` and `backward_cost` of units, `pack_cost` of packs (None: no such work).

    `reduce` and `update`: seconds of each side, by role; absent: none.
    """

    encode_cost: CostModel
    backward_cost: CostModel | None
    pack_cost: CostModel
    reduce: Mapping[Role, float]
    update: Mapping[Role, float]

    def of(self, step: Step) -> StepSeconds:
        units = [unit for pack in step.packs for unit in pack.units]
        forth, back, train = self.encode_cost, self.backward_cost, self.pack_cost
        encode = {unit.id: forth.real(forth.unit_cost(unit.samples)) for unit in units}
        backward = {unit.id: back.real(back.unit_cost(unit.samples)) if back else 0.0 for unit in units}
        packs = [[train.real(train.pack_cost(pack.samples)) for pack in slot] for slot in step.slots]
        return StepSeconds(encode, backward, packs, [0.0] * len(packs[0]))

    def reduce_seconds(self, role: Role) -> float:
        return self.reduce.get(role, 0.0)

    def update_seconds(self, role: Role) -> float:
        return self.update.get(role, 0.0)


@dataclass(frozen=True, slots=True)
class ProfileTiming:
    """Seconds by a profile. `cost` is the one by which its work counts FLOPs (`packing.cost: model`)."""

    profile: Profile
    cost: CostModel
    threads: Mapping[Role, int]
    colocated: bool

    def of(self, step: Step) -> StepSeconds:
        cost, both = self.cost, not self.colocated
        encode, backward = {}, {}
        for pack in step.packs:
            for unit in pack.units:
                work = cost.real(cost.encode_cost(unit.samples))
                encode[unit.id] = self._seconds(Role.PRODUCER, "forward", work, both)
                backward[unit.id] = self._seconds(Role.PRODUCER, "backward", work, both)
        packs = [
            [self._seconds(Role.CONSUMER, "forward", cost.real(cost.pack_cost(pack.samples)), both) for pack in slot]
            for slot in step.slots
        ]
        return StepSeconds(encode, backward, packs, [0.0] * len(packs[0]))

    def _seconds(self, role: Role, part: Part, work: float, together: bool) -> float:
        return self.profile.seconds(
            role,
            part,
            work,
            threads=self.threads[role],
            colocated=self.colocated,
            together=together,
        )

    def reduce_seconds(self, role: Role) -> float:
        return 0.0

    def update_seconds(self, role: Role) -> float:
        """The profile's update includes the reduction."""
        return self.profile.update_seconds(role, self.threads[role], self.colocated)
