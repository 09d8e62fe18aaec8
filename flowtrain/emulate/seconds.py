"""How long an emulated device works: the simulator's seconds of a unit or pack, disturbed and scaled (pure).

The same numbers serve the devices, one order at a time, and the simulator, a step at a time: what differs between an
emulated run and its simulation is then the runtime alone. A piece of work has the same factor wherever and whenever it
is done, since it is drawn from what the work is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from flowtrain.simulator.device_timing import DeviceTiming
from flowtrain.simulator.timing import StepSeconds
from flowtrain.types import EncodeUnit, Pack, Role, Step, UnitId

MOST_KEPT = 4096
"""Packs whose seconds are kept."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Real seconds; `scale`: of a modelled second, `jitter`: of the logarithm of each piece of work.

    A pipeline is filled in front of a rank's first pack of a step: that pack lasts (pp - 1) / vpp times longer. What
    packs last is kept: every peer of a rank asks for it.
    """

    timing: DeviceTiming
    scale: float
    jitter: float
    seed: int
    _packs: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def of(self, step: Step) -> StepSeconds:
        """Of all units and packs of a step (`flowtrain.simulator.timing.Timing`)."""
        plain = self.timing.of(step)
        packs = [
            [
                seconds * self._factor("train", step.index, pack.slot, pack.rank)
                for seconds, pack in zip(*row, strict=True)
            ]
            for row in zip(plain.packs, step.slots, strict=True)
        ]
        fill = self._fill
        return StepSeconds(
            {unit: seconds * self._of_unit("encode", unit) for unit, seconds in plain.encode.items()},
            {unit: seconds * self._of_unit("backward", unit) for unit, seconds in plain.backward.items()},
            packs,
            [fill * seconds for seconds in packs[0]],
            plain.flops,
        )

    def pack(self, step: int, pack: Pack) -> float:
        """Forward and backward of a pack on its rank."""
        key = (step, pack.slot, pack.rank)
        if (kept := self._packs.get(key)) is None:
            if len(self._packs) >= MOST_KEPT:
                self._packs.clear()
            kept = self._packs[key] = self._pack(step, pack)
        return kept

    def _pack(self, step: int, pack: Pack) -> float:
        sizes = [self.timing.counter.pack(pack.samples)]
        seconds = float(self.timing.backbone.seconds(sizes)[0]) * self._factor("train", step, pack.slot, pack.rank)
        return seconds * (1.0 + self._fill) if pack.slot == 0 else seconds

    def encode(self, unit: EncodeUnit) -> float:
        """Forward of a unit."""
        return self._encoder(unit, forward_only=True) * self._of_unit("encode", unit.id)

    def backward(self, unit: EncodeUnit) -> float:
        """The rest of what it takes with its backward."""
        whole, forward = self._encoder(unit, forward_only=False), self._encoder(unit, forward_only=True)
        return (whole - forward) * self._of_unit("backward", unit.id)

    def _encoder(self, unit: EncodeUnit, forward_only: bool) -> float:
        assert self.timing.encoder is not None, f"unit {unit.id} has images and the plan no encoder"
        return float(self.timing.encoder.seconds([self.timing.counter.unit(unit.samples)], forward_only)[0])

    def reduce_seconds(self, role: Role) -> float:
        return self.scale * self.timing.reduce_seconds(role)

    def update_seconds(self, role: Role) -> float:
        return self.scale * self.timing.update_seconds(role)

    @property
    def _fill(self) -> float:
        candidate = self.timing.backbone.candidate
        return (candidate.pp - 1) / candidate.vpp

    def undisturbed(self) -> Seconds:
        return replace(self, jitter=0.0)

    def _of_unit(self, kind: str, unit: UnitId) -> float:
        return self._factor(kind, unit.step, unit.slot, unit.rank, unit.number)

    def _factor(self, *of: object) -> float:
        if not self.jitter:
            return self.scale
        dice = random.Random(f"{self.seed} {of}")
        return self.scale * dice.lognormvariate(-0.5 * self.jitter**2, self.jitter)
