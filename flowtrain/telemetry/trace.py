"""What each process did and when (`run.trace`): one file a process in RUN_DIR/traces, written as the run goes.

    Spans ──▶ Trace of a rank         s  name start end       a piece of work, within an order
                                      c  method start end     an order, from first to last
    Controller ──▶ Trace of its own   s  name start end
                                      q  track method … at    an order was sent; between, the slots that it works for
                                      a  track method at      its answer was taken
                                      m  step at              the update of a step was sent: the step ends
                                      o  track nanoseconds    a clock's distance from the controller's
    all ──▶                           t  events nanoseconds   what tracing cost the process so far (processor time)

Times are nanoseconds of the process's monotonic clock, which all processes of a machine share. Events are kept in
memory and written in lumps of `LUMP`; after `MAX_EVENTS` a process records no more, so that neither memory nor disk is
unbounded. `timeline` reads these files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flowtrain.errors import PlanError

TRACE_FOLDER = "traces"
CONTROLLER = "controller"

LUMP = 1024
"""Events held in memory: some 100 KiB."""

HELD_NS = 1_000_000_000
"""Longest that an event is held once an order has ended: what a process that is killed can lose."""

MAX_EVENTS = 200_000
"""Of one process: 20 MB in its file."""

PROBES = 500
"""Spans recorded for nothing at the start, to know what one costs."""

Event = tuple[Any, ...]


class Trace:
    """Events of one process; one thread only. `PlanError` when its file cannot be written at the start; later, as on
    a full disk, recording ends and the run goes on."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.path = run_dir / TRACE_FOLDER / f"{name}.jsonl"
        self._held: list[Event] = []
        self._recorded = 0
        self._flush_ns = 0
        self._flushed_at = time.monotonic_ns()
        self._event_ns = 0.0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")
        except OSError as error:
            raise PlanError(f"cannot write {self.path}: {error.strerror}; change run.dir or run.trace") from error

    def add(self, *event: Any) -> None:
        """One event, as in the table above."""
        self._held.append(event)
        if len(self._held) >= LUMP:
            self.flush()

    def rest(self) -> None:
        """An order has ended: nobody waits for the file now."""
        if time.monotonic_ns() - self._flushed_at > HELD_NS:
            self.flush()

    def calibrate(self, span: Callable[[str], AbstractContextManager[None]]) -> None:
        """Learn what recording a span costs; `span` records here. What it records is forgotten."""
        start = time.thread_time_ns()
        for _ in range(PROBES):
            with span("probe"):
                pass
        self._event_ns = (time.thread_time_ns() - start) / PROBES
        self._held.clear()

    def flush(self) -> None:
        """Write what is held."""
        start, self._flushed_at = time.thread_time_ns(), time.monotonic_ns()
        held, self._held = self._held[: MAX_EVENTS - self._recorded], []
        if not held:
            return
        self._recorded += len(held)
        cost = ("t", self._recorded, self._flush_ns + round(self._recorded * self._event_ns))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(event)}\n" for event in (*held, cost)))
        except OSError:
            self._recorded = MAX_EVENTS
        self._flush_ns += time.thread_time_ns() - start

    def close(self) -> None:
        """Idempotent."""
        self.flush()


def clear_traces(run_dir: Path) -> None:
    """Remove what an earlier run in this folder left; called before any process opens its file."""
    for file in (run_dir / TRACE_FOLDER).glob("*.jsonl"):
        file.unlink(missing_ok=True)
