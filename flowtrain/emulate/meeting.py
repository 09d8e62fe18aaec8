"""Work that devices of one process do together, and how a device lets time pass.

A pack of consumers whose parameters are cut over them starts once all are there, and takes as long as the slowest's: a
call of the model is then a collective. Such devices share a process, so that they meet without a message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass

from flowtrain.errors import PeerError


def pause_until(moment: float) -> None:
    """Sleep until `moment` of `time.perf_counter`; returns at once when it is over."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(slots=True)
class _Open:
    present: int = 0
    left: int = 0
    start: float = 0.0
    seconds: float = 0.0


class Meeting:
    """Of so many devices. Each comes to every piece of work, in the same order."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.ranks: set[int] = set()
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}

    def end_of(self, number: int, ready: float, seconds: float, timeout: float) -> float:
        """When the `number`-th work of all ends; this device could begin at `ready` and would take `seconds`.

        Raises:
            PeerError: the others did not come in time.
        """
        with self._changed:
            work = self._open.setdefault(number, _Open())
            work.present += 1
            work.start, work.seconds = max(work.start, ready), max(work.seconds, seconds)
            if work.present == self.members:
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: work.present == self.members, timeout):
                raise PeerError(f"{work.present} of {self.members} devices came within {timeout:g} s to work {number}")
            work.left += 1
            if work.left == self.members:
                del self._open[number]
            return work.start + work.seconds


_meetings: dict[Hashable, Meeting] = {}
_lock = threading.Lock()


def enter(name: Hashable, members: int, rank: int) -> Meeting:
    """The meeting of this name in this process; a rank that enters again begins another one: a new run."""
    with _lock:
        meeting = _meetings.get(name)
        if meeting is None or rank in meeting.ranks or meeting.members != members:
            meeting = _meetings[name] = Meeting(members)
        meeting.ranks.add(rank)
        return meeting
