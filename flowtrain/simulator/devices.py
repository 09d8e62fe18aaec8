"""Devices that work off what they are sent, each in the order of arrival; some work is done together (pure).

    submit(device, arrival, seconds, tag) ─▶ queue of the device ─▶ finished(tag, Span)

What is at the head of a queue starts when it has arrived and the device is free. A *meeting* is work that several
devices do together, such as a reduction: it starts when it is at the head of all their queues and takes as long for
each as for the slowest. Since nothing is taken back, the end of work is known as soon as all that it waits for has been
sent: `finished` is called then, with times that may lie ahead.

Invariants: spans of a device do not overlap and follow one another in the order of submission; idle + waiting + working
seconds of a device add up to the end of its last span.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One piece of work: free since `free`, at the head of its queue at `ready`, from `start` to `end`."""

    device: int
    free: float
    ready: float
    start: float
    end: float

    @property
    def idle(self) -> float:
        """Seconds in which the device had nothing to do."""
        return self.ready - self.free


class Work(NamedTuple):
    arrival: float
    seconds: float
    tag: Any
    meeting: Hashable | None
    members: int


@dataclass(slots=True)
class _Meeting:
    start: float = 0.0
    seconds: float = 0.0
    present: list[tuple[int, float, Any]] = field(default_factory=list)


class Devices:
    """See the module's page. `finished(tag, span)` is told of each piece of work."""

    def __init__(self, num_devices: int, finished: Callable[[Any, Span], None]) -> None:
        self._free = [0.0] * num_devices
        self._queues: list[deque[Work]] = [deque() for _ in range(num_devices)]
        self._meetings: dict[Hashable, _Meeting] = {}
        self._finished = finished

    def submit(
        self, device: int, arrival: float, seconds: float, tag: Any, meeting: Hashable | None = None, members: int = 1
    ) -> None:
        """`members`: devices that take part in the meeting of this name."""
        queue = self._queues[device]
        queue.append(Work(arrival, seconds, tag, meeting, members))
        if len(queue) == 1:
            self._go_on(device)

    def next_event(self) -> float:
        """Infinity: the end of work is told when it is sent, no moment has to be waited for."""
        return math.inf

    def advance(self, moment: float) -> None:
        """All that ends by then has been told."""

    def restart(self, at: float) -> None:
        """All that was sent and has not been finished is forgotten, and every device is free from `at` on."""
        self._meetings.clear()
        for device, queue in enumerate(self._queues):
            queue.clear()
            self._free[device] = at

    def _go_on(self, device: int) -> None:
        """Finish what is at the heads of queues, as far as it can be."""
        moved = [device]
        while moved:
            device = moved.pop()
            queue = self._queues[device]
            while queue:
                work, free = queue[0], self._free[device]
                ready = max(work.arrival, free)
                if work.meeting is None:
                    queue.popleft()
                    self._free[device] = end = ready + work.seconds
                    self._finished(work.tag, Span(device, free, ready, ready, end))
                    continue
                meeting = self._meetings.setdefault(work.meeting, _Meeting())
                meeting.present.append((device, ready, work.tag))
                meeting.start = max(meeting.start, ready)
                meeting.seconds = max(meeting.seconds, work.seconds)
                if len(meeting.present) < work.members:
                    break
                del self._meetings[work.meeting]
                end = meeting.start + meeting.seconds
                for member, its_ready, tag in meeting.present:
                    self._queues[member].popleft()
                    its_free, self._free[member] = self._free[member], end
                    self._finished(tag, Span(member, its_free, its_ready, meeting.start, end))
                    if member != device:
                        moved.append(member)
