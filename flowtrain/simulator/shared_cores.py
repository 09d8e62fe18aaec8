"""Ranks that share processor cores: while more of them are at work, each is slower (pure).

    submit(device, arrival, seconds, tag) ─▶ queue of the rank ─▶ advance(moment) ─▶ finished(tag, Span)

The orders and meetings are those of `Devices`; `seconds` are those of a rank that works alone. When the number of ranks
at work changes, what is left of everybody's work goes on at another speed, so an end is known only when it is there:
`next_event` says when something may change, `advance` goes on to a moment.

Invariants: as in `Devices`; ranks at work have together no more than `num` cores; time never goes back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from flowtrain.simulator.devices import Span, Work

LEAST_SECONDS = 1e-9
"""Work of which less is left is done: what rounding leaves."""


@dataclass(frozen=True, slots=True)
class Cores:
    """`num` cores; `together`: speed of a rank while all of them are busy, beside that of a rank alone (caches, memory,
    clock rate); between the two in proportion. More ranks than cores take turns on them."""

    num: int
    together: float = 1.0

    def __post_init__(self) -> None:
        assert self.num > 0, self
        assert 0.0 < self.together <= 1.0, self

    def speed(self, ranks: int) -> float:
        """Of each, while so many are at work."""
        busy = min(ranks, self.num)
        lost = (1.0 - self.together) * (busy - 1) / (self.num - 1) if self.num > 1 else 0.0
        return (1.0 - lost) * busy / max(ranks, 1)


@dataclass(slots=True)
class _Running:
    """The head of a rank's queue, at work since `start`."""

    free: float
    ready: float
    start: float
    left: float


class SharedCores:
    """See the module's page. `finished(tag, span)` is told of each piece of work, when it ends."""

    def __init__(self, num_devices: int, cores: Cores, finished: Callable[[Any, Span], None]) -> None:
        self._cores = cores
        self._free = [0.0] * num_devices
        self._queues: list[deque[Work]] = [deque() for _ in range(num_devices)]
        self._running: dict[int, _Running] = {}
        self._finished = finished
        self._now = 0.0

    def submit(
        self, device: int, arrival: float, seconds: float, tag: Any, meeting: Hashable | None = None, members: int = 1
    ) -> None:
        """`members`: devices that take part in the meeting of this name."""
        assert arrival >= self._now, f"work for {arrival} is sent at {self._now}"
        self._queues[device].append(Work(arrival, seconds, tag, meeting, members))

    def restart(self, at: float) -> None:
        """All that was sent and has not been finished is forgotten, and every device is free from `at` on."""
        self._running.clear()
        for device, queue in enumerate(self._queues):
            queue.clear()
            self._free[device] = at
        self._now = at

    def next_event(self) -> float:
        """When work begins or ends next, if nothing more is sent; infinity when nothing will."""
        speed = self._cores.speed(len(self._running))
        ends = [self._now + running.left / speed for running in self._running.values()]
        begins = [max(self._now, start) for start in self._begins().values()]
        return min((*ends, *begins), default=math.inf)

    def advance(self, moment: float) -> None:
        """Go on until then."""
        while (event := self.next_event()) <= moment:
            self._elapse(event)
            self._end()
            for device, start in self._begins().items():
                if start <= event:
                    ready = max(self._free[device], self._queues[device][0].arrival)
                    self._running[device] = _Running(self._free[device], ready, event, self._seconds(device))
        self._elapse(moment)

    def _elapse(self, moment: float) -> None:
        done = (moment - self._now) * self._cores.speed(len(self._running))
        for running in self._running.values():
            running.left -= done
        self._now = moment

    def _end(self) -> None:
        for device in [device for device, running in self._running.items() if running.left <= LEAST_SECONDS]:
            running, work = self._running.pop(device), self._queues[device].popleft()
            self._free[device] = self._now
            self._finished(work.tag, Span(device, running.free, running.ready, running.start, self._now))

    def _begins(self) -> dict[int, float]:
        """Devices whose next work can begin, and from when on: that of a meeting once all members are there."""
        ready = {
            device: max(queue[0].arrival, self._free[device])
            for device, queue in enumerate(self._queues)
            if queue and device not in self._running
        }
        met: dict[Hashable, list[int]] = {}
        for device in ready:
            if (meeting := self._queues[device][0].meeting) is not None:
                met.setdefault(meeting, []).append(device)
        for devices in met.values():
            whole = len(devices) == self._queues[devices[0]][0].members
            start = max(ready[device] for device in devices)
            for device in devices:
                if whole:
                    ready[device] = start
                else:
                    del ready[device]
        return ready

    def _seconds(self, device: int) -> float:
        """Of its next work; of a meeting, those of the slowest."""
        work = self._queues[device][0]
        if work.meeting is None:
            return work.seconds
        return max(queue[0].seconds for queue in self._queues if queue and queue[0].meeting == work.meeting)
