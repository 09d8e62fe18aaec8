"""What the steps of a run measured, gathered from the stages' answers for `flowtrain.allocator.drift` (C10).

UnitEncoded, UnitsReturned, PackTrained ──add up by step──▶ StepMeasured ──▶ Drift ──▶ Verdict, once a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowtrain.allocator.drift import Drift, StepMeasured, Verdict
from flowtrain.messages import PackTrained, UnitEncoded, UnitsReturned
from flowtrain.types import Pack, Phase, Step


@dataclass(slots=True)
class _Sums:
    """One step so far: seconds of all processes of a side, and the works of its packs."""

    num_packs: int
    encode_work: float
    train_work: float
    produced: float = 0.0
    consumed: float = 0.0
    starvation: float = 0.0
    stall: float = 0.0


class DriftWatch:
    """`work`: (encoder's, backbone's) FLOPs of a pack, whatever its cost is measured in."""

    def __init__(
        self, drift: Drift, num_consumers: int, trainable_encoder: bool, work: Callable[[Pack], tuple[float, float]]
    ) -> None:
        self.drift = drift
        self.num_consumers = num_consumers
        self.trainable_encoder = trainable_encoder
        self.work = work
        self._steps: dict[int, _Sums] = {}

    def composed(self, step: Step) -> None:
        if step.phase is Phase.TRAIN:
            works = [self.work(pack) for pack in step.packs]
            encode, train = (sum(side) for side in zip(*works, strict=True))
            self._steps[step.index] = _Sums(len(step.packs), encode, train)

    def saw(self, answer: Any) -> None:
        """An answer of a stage; those that tell no time of a training step are passed over."""
        if isinstance(answer, UnitEncoded) and answer.unit.phase is Phase.TRAIN:
            self._producer(answer.unit.step, answer)
        elif isinstance(answer, UnitsReturned):
            self._producer(answer.units[0].step, answer)
        elif isinstance(answer, PackTrained) and answer.phase is Phase.TRAIN and answer.step in self._steps:
            sums = self._steps[answer.step]
            sums.consumed += answer.seconds
            sums.starvation += answer.waited

    def _producer(self, step: int, answer: UnitEncoded | UnitsReturned) -> None:
        if (sums := self._steps.get(step)) is not None:
            sums.produced += answer.seconds
            sums.stall += answer.waited

    def recorded(self, step: int) -> Verdict:
        """A step is over; steps are told in order."""
        sums = self._steps.pop(step)
        ends = sums.produced / sums.num_packs if self.trainable_encoder else 0.0
        return self.drift.add(
            StepMeasured(
                step=step,
                produced=sums.produced,
                consumed=sums.consumed,
                starvation=sums.starvation / self.num_consumers,
                stall=sums.stall / self.drift.num_producers,
                encode_work=sums.encode_work,
                train_work=sums.train_work,
                ends=ends,
            )
        )
