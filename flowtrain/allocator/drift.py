"""Whether a run still does what its plan expects, and which number of producers would do better (pure, C10).

    step measured ──▶ window of steps ──▶ seconds and work of each side ──▶ drift(%) against what was expected
                                                     │                             │ beyond the threshold
                                                     └── rate of every number of producers ──▶ Proposal

1. A step tells the seconds that its processes were busy, and the work of its packs on both sides (FLOPs of the cost
   model: the modality ratio of its rows). The first `warmup` steps are left out: processes are still warming up.
2. Of the last `window` steps the medians are taken, so that one slow step counts for nothing.
3. Expected is what the plan was made for: the profile's figures, else the first full window. Drift is the larger
   change, as a factor, of the two sides' seconds to each other and of their work to each other, of one process each:
   balanced sides have about 1, and below `IDLE` a side counts as idle, whose noise is nobody's drift.
4. Beyond `threshold_percent` for `patience` steps, the step time of every number of producers is reckoned. The smallest
   that is within `min_gain_percent` of the best is proposed if it is a smaller number than now, or gains as much. A
   smaller number needs producers that wait, and a larger one consumers that do, unless producers run ahead: then
   waits come only when what they are ahead by is used up.
5. Nothing more is proposed until the drift is below half of the threshold again (hysteresis) or the plan has changed.
   After a change the next full window is what is expected.

Invariants: the same steps give the same proposals; a proposal differs from the present number and is within the bounds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

IDLE = 0.1
"""A side that is busy for less than this share of the other side's time."""


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """One step, in seconds and in FLOPs.

    Attributes:
        produced: busy seconds of the producers, summed; `consumed`: of the consumers.
        starvation: mean seconds that a consumer waited; `stall`: that a producer did.
        encode_work: predicted cost of its images; `train_work`: of its packs.
        ends: seconds at the two ends of a step of a trainable encoder in which consumers have nothing to do: encoding
            the first pack, returning through the last. 0 where producers run ahead.
    """

    step: int
    produced: float
    consumed: float
    starvation: float
    stall: float
    encode_work: float
    train_work: float
    ends: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """When to propose, and among what."""

    max_producers: int
    num_consumers: int
    cores: int | None
    window: int = 6
    warmup: int = 3
    patience: int = 3
    threshold_percent: float = 25.0
    min_gain_percent: float = 5.0

    def __post_init__(self) -> None:
        assert min(self.max_producers, self.num_consumers, self.window, self.patience) > 0, self
        assert self.warmup >= 0 <= self.min_gain_percent, self
        assert self.threshold_percent > 0, self


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plan was made for: seconds and work of all producers over those of all consumers."""

    seconds_ratio: float
    work_ratio: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """Another number of producers, and the predicted gain of rows per second over staying."""

    producers: int
    gain_percent: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one step; None while the window is filling."""

    drift_percent: float | None
    proposal: Proposal | None


class Drift:
    """See the page above. `expected` None: the first full window is taken for it."""

    def __init__(self, rule: Rule, num_producers: int, expected: Expected | None = None) -> None:
        self.rule = rule
        self.num_producers = num_producers
        self.expected = expected
        self._window: deque[StepMeasured] = deque(maxlen=rule.window)
        self._to_skip = rule.warmup
        self._beyond = 0
        self._proposed = False

    def add(self, measured: StepMeasured) -> Verdict:
        """One more step, in order."""
        if self._to_skip:
            self._to_skip -= 1
            return Verdict(None, None)
        self._window.append(measured)
        found = self._found()
        if len(self._window) < self.rule.window or found is None:
            return Verdict(None, None)
        if self.expected is None:
            self.expected = found
        drift = self._drift(found, self.expected)
        if drift > self.rule.threshold_percent:
            self._beyond += 1
        elif drift < self.rule.threshold_percent / 2:
            self._beyond = 0
            self._proposed = False
        ready = self._beyond >= self.rule.patience and not self._proposed
        proposal = self._propose() if ready else None
        self._proposed |= proposal is not None
        return Verdict(drift, proposal)

    def changed(self, num_producers: int) -> None:
        """The plan has changed: what is measured from here on is what is expected of it."""
        self.num_producers = num_producers
        self.expected = None
        self._window.clear()
        self._to_skip = self.rule.warmup
        self._beyond = 0
        self._proposed = False

    def _found(self) -> Expected | None:
        consumed, trained = self._median("consumed"), self._median("train_work")
        if consumed <= 0 or trained <= 0:
            return None
        return Expected(self._median("produced") / consumed, self._median("encode_work") / trained)

    def _median(self, name: str) -> float:
        return float(median(getattr(measured, name) for measured in self._window))

    def _drift(self, found: Expected, expected: Expected) -> float:
        """The larger of the two factors of change, in percent: 100 is twice as much, or half."""
        of_one = self.rule.num_consumers / self.num_producers
        pairs = ((found.seconds_ratio, expected.seconds_ratio), (found.work_ratio, expected.work_ratio))
        return max(_factor(now * of_one, before * of_one) for now, before in pairs)

    def _propose(self) -> Proposal | None:
        seconds = {number: self.step_seconds(number) for number in range(1, self.rule.max_producers + 1)}
        enough = min(seconds.values()) * (1 + self.rule.min_gain_percent / 100)
        best = next(number for number in sorted(seconds) if seconds[number] <= enough)
        gain = 100.0 * (self.step_seconds(self.num_producers) / seconds[best] - 1.0)
        if best == self.num_producers or (best > self.num_producers and gain < self.rule.min_gain_percent):
            return None
        return Proposal(best, gain) if self._seen(best) else None

    def _seen(self, best: int) -> bool:
        """Whether waits bear out what would be gained, or given away."""
        consuming = self._median("consumed") / self.rule.num_consumers
        if best > self.num_producers:
            runs_ahead = self._median("ends") == 0
            return runs_ahead or self._median("starvation") >= self.rule.min_gain_percent / 100 * consuming
        extra = self._median("produced") * (1 / best - 1 / self.num_producers)
        return self._median("stall") * (1 + self.rule.threshold_percent / 100) >= extra

    def step_seconds(self, num_producers: int) -> float:
        """Predicted seconds of a step like those of the window with another number of producers.

        The ends of a step of a trainable encoder do not overlap the consumers: one pack long, whoever makes it. Both
        sides' busy seconds together take the cores that there are, where they are processors.
        """
        produced, consumed = self._median("produced"), self._median("consumed")
        of_consumers = consumed / self.rule.num_consumers
        seconds = max(produced / num_producers, of_consumers + self._median("ends"))
        if self.rule.cores is not None:
            seconds = max(seconds, (produced + consumed) / self.rule.cores)
        return max(seconds, 1e-9)


def _factor(now: float, before: float) -> float:
    """How far apart two ratios are, in percent of the smaller."""
    low, high = sorted((min(max(now, IDLE), 1 / IDLE), min(max(before, IDLE), 1 / IDLE)))
    return 100.0 * (high / low - 1.0)
