"""What a signal does to a run: the first asks for an orderly end, the second ends it at once (contract C9).

| signal | while starting | while training |
|---|---|---|
| SIGINT, SIGTERM | ends at once | finishes the step, writes a checkpoint, ends with 130 or 143 |
| a second one | ends at once | ends at once |
| SIGHUP (the launcher is gone) | ends at once | ends at once |

A Ray job or a Slurm allocation that is stopped signals every process of it: the driver hears it directly and from the
launcher, which passes it on. There the same signal counts once within `ECHO_SECONDS`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from flowtrain.errors import FlowTrainError, Interrupted, Terminated

ECHO_SECONDS = 3.0


class StopRequest:
    """Installed once on the main thread; `requested` is read by the controller's loop. `echo_seconds`: for so long
    after the first signal the same one counts once."""

    def __init__(self, deadline_seconds: float, echo_seconds: float = 0.0) -> None:
        self.deadline_seconds = deadline_seconds
        self.echo_seconds = echo_seconds
        self.orderly = False
        self.wake: Callable[[], None] | None = None
        self.leave: Callable[[FlowTrainError], None] | None = None
        self._held = False
        self._error: FlowTrainError | None = None
        self._deadline = float("inf")
        self._first: tuple[int, float] | None = None

    def install(self) -> None:
        """Call again after anything that sets handlers of its own (`ray.init` does for SIGTERM)."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What comes while this is open is raised at its end: Ray's start swallows exceptions, and exits on SIGTERM.

        With `leave`, which ends the process, nobody waits for that: there is nothing to save yet.
        """
        self._held = True
        try:
            yield
        except SystemExit:  # from the handler that Ray puts in place of ours
            self._note(signal.SIGTERM)
        finally:
            self._held = False
            self.install()
            if self._error is not None:
                raise self._error

    @property
    def requested(self) -> bool:
        return self._error is not None

    @property
    def overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def error(self) -> FlowTrainError:
        """What the run ends with."""
        assert self._error is not None
        return self._error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and number == self._first[0] and now - self._first[1] < self.echo_seconds:
            return
        first = self._error is None
        self._first = self._first or (number, now)
        self._note(number)
        if self._held:
            if self.leave is not None:
                self.leave(self.error())
            return
        if not self.orderly or not first or number == signal.SIGHUP:
            raise self.error()
        self._deadline = time.monotonic() + self.deadline_seconds
        if self.wake is not None:
            self.wake()

    def _note(self, number: int) -> None:
        if number == signal.SIGINT:
            self._error = self._error or Interrupted("interrupted (SIGINT)")
        elif number == signal.SIGTERM:
            self._error = self._error or Terminated("terminated (SIGTERM)")
        else:
            self._error = Terminated("the launcher is gone (SIGHUP): the run was ended at once")
