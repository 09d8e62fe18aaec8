"""What came of a simulated run: a line a step, sums over them, and the spans of some ranks for a picture (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from flowtrain.types import Role

MOST_SKIPPED = 5
"""First steps that a steady rate leaves out, at most a quarter of all: they fill the pipeline."""


class RankSpan(NamedTuple):
    """What a rank did from `start` to `end`: `encode`, `backward`, `train`, `reduce`, `update` or `save`."""

    role: Role
    rank: int
    kind: str
    step: int
    start: float
    end: float


@dataclass(slots=True)
class StepRecord:
    """Sums of one step. Seconds are a rank's, as a mean over the ranks of its side.

    Attributes:
        end: when the last rank had updated.
        starvation: consumers had nothing to run; `stall` the same of producers; `lock_step`: consumers waited for one
            another within a slot, `reduce_wait` for the reduction, `update_wait` for the last backwards and the update.
        consumer_seconds, producer_seconds: at work on packs and units.
        imbalance: largest over mean seconds on packs of a consumer.
    """

    step: int
    rows: int
    text_tokens: int
    vision_tokens: int
    flops: float | None
    end: float = 0.0
    starvation: float = 0.0
    stall: float = 0.0
    lock_step: float = 0.0
    reduce_wait: float = 0.0
    update_wait: float = 0.0
    consumer_seconds: float = 0.0
    producer_seconds: float = 0.0
    imbalance: float = 1.0
    by_consumer: list[float] = field(default_factory=list)

    def close(self, num_producers: int) -> None:
        """All spans but those of the update are in: sums become means."""
        num = len(self.by_consumer)
        mean = sum(self.by_consumer) / num
        self.imbalance = max(self.by_consumer) / mean if mean else 1.0
        self.consumer_seconds = mean
        self.starvation /= num
        self.lock_step /= num
        self.reduce_wait /= num
        self.stall /= num_producers
        self.producer_seconds /= num_producers
        self.by_consumer = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run.

    Attributes:
        seconds: from the start to the end of the last step.
        failures: how many; `lost_seconds`: from the last checkpoint to the failure, and until all was up again.
        answers: messages that the controller took; `control_seconds`: how long it was busy with them.
    """

    steps: Sequence[StepRecord]
    seconds: float
    num_devices: int
    num_consumers: int
    failures: int
    lost_seconds: float
    saved: int
    answers: int
    control_seconds: float
    spans: Sequence[RankSpan] = ()

    @property
    def steady(self) -> tuple[Sequence[StepRecord], float]:
        """The steps by which rates are told, and their seconds; all of them where something failed."""
        skipped = 0 if self.failures else min(MOST_SKIPPED, len(self.steps) // 4)
        begin = self.steps[skipped - 1].end if skipped else 0.0
        return self.steps[skipped:], self.steps[-1].end - begin

    def figures(self, peak_flops: float | None = None) -> dict[str, float]:
        """Of the steady steps; `peak_flops`: of one device, for MFU."""
        steps, seconds = self.steady
        num = len(steps)
        step_seconds = seconds / num
        tokens = sum(step.text_tokens + step.vision_tokens for step in steps)
        found = {
            "samples_per_second": sum(step.rows for step in steps) / seconds,
            "tokens_per_second_per_device": tokens / seconds / self.num_devices,
            "step_seconds": step_seconds,
            "starvation_percent": 100.0 * sum(step.starvation for step in steps) / seconds,
            "stall_percent": 100.0 * sum(step.stall for step in steps) / seconds,
            "lock_step_percent": 100.0 * sum(step.lock_step for step in steps) / seconds,
            "reduce_wait_percent": 100.0 * sum(step.reduce_wait for step in steps) / seconds,
            "update_wait_percent": 100.0 * sum(step.update_wait for step in steps) / seconds,
            "consumer_busy_percent": 100.0 * sum(step.consumer_seconds for step in steps) / seconds,
            "producer_busy_percent": 100.0 * sum(step.producer_seconds for step in steps) / seconds,
            "imbalance": sum(step.imbalance for step in steps) / num,
            "failures": self.failures,
            "lost_percent": 100.0 * self.lost_seconds / self.seconds,
            "answers_per_step": self.answers / len(self.steps),
            "control_percent": 100.0 * self.control_seconds / self.seconds,
        }
        flops = [step.flops for step in steps if step.flops is not None]
        if peak_flops is not None and len(flops) == num:
            found["mfu_percent"] = 100.0 * sum(flops) / (seconds * peak_flops * self.num_devices)
        return found

    def to_dict(self, peak_flops: float | None = None) -> dict[str, Any]:
        """JSON-ready, spans left out."""
        steps = [{key: value for key, value in asdict(step).items() if key != "by_consumer"} for step in self.steps]
        return {**self.figures(peak_flops), "devices": self.num_devices, "seconds": self.seconds, "steps": steps}
