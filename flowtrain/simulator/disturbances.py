"""What makes a cluster uneven: jitter, slow devices, lost processes (pure; everything follows from a seed).

| what | how it is drawn |
|---|---|
| jitter | the seconds of each piece of work times a log-normal factor of mean 1 |
| stragglers | a share of the ranks, the same ones all along, takes `slowdown` times as long |
| failures | a Poisson process; each ends the run, which goes on from its last checkpoint |
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Nothing is disturbed by default.

    Attributes:
        jitter: standard deviation of the logarithm of the factor.
        straggler_share: of the ranks of either side; `slowdown`: how much longer they take.
        device_hours: mean hours between two failures of one device; None: none fails.
        restart_seconds: from a failure until the processes are up again.
    """

    jitter: float = 0.0
    straggler_share: float = 0.0
    slowdown: float = 1.0
    device_hours: float | None = None
    restart_seconds: float = 120.0
    seed: int = 0

    def slow_ranks(self, num_ranks: int, side: str) -> list[float]:
        """The factor of each rank of a side."""
        dice = random.Random(f"{self.seed} stragglers {side}")
        slow = set(dice.sample(range(num_ranks), round(self.straggler_share * num_ranks)))
        return [self.slowdown if rank in slow else 1.0 for rank in range(num_ranks)]


class Chance:
    """The draws of one run, in the order in which they are asked for."""

    def __init__(self, of: Disturbances, num_devices: int) -> None:
        self._dice = random.Random(f"{of.seed} jitter")
        self._failures = random.Random(f"{of.seed} failures")
        self._jitter, self._mean = of.jitter, -0.5 * of.jitter**2
        self._seconds = of.device_hours * HOUR / num_devices if of.device_hours is not None else math.inf

    def factor(self) -> float:
        """Of the seconds of one piece of work."""
        return self._dice.lognormvariate(self._mean, self._jitter) if self._jitter else 1.0

    def next_failure(self, after: float) -> float:
        """When the next device fails; infinity when none does."""
        return math.inf if self._seconds == math.inf else after + self._failures.expovariate(1.0 / self._seconds)
