"""The controller's own part of a run's trace: what it did, what it sent and took, how far other clocks are from its.

    ControllerTrace ──▶ traces/controller.jsonl ─┐
    stages          ──▶ traces/ROLE-RANK.jsonl  ─┴─ at the end ─▶ trace.json

Processes of one machine share the monotonic clock; that of another machine is asked for `ROUNDS` times, and the answer
that took least time says how far it is. A distance smaller than half of that time is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from flowtrain.plan import RankPlan
from flowtrain.runtime.executor import Executor
from flowtrain.telemetry.spans import Spans, no_span
from flowtrain.telemetry.timeline import TRACE_FILE, read_timeline, write_chrome_trace
from flowtrain.telemetry.trace import CONTROLLER, Trace, clear_traces
from flowtrain.types import Role

ROUNDS = 5
ANSWER_SECONDS = 10.0


class ControllerTrace:
    """A context manager; every method does nothing where the run has no trace (`run_dir` None)."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._spans: Spans | None = None
        self._trace: Trace | None = None
        if run_dir is not None:
            clear_traces(run_dir)
            self._trace = Trace(run_dir, CONTROLLER)
            self._spans = Spans(run_dir / "spans" / CONTROLLER, self._trace)

    @property
    def recording(self) -> bool:
        return self._trace is not None

    def span(self, name: str) -> AbstractContextManager[None]:
        return no_span(name) if self._spans is None else self._spans(name)

    def sent(self, role: Role, rank: int, method: str, slots: Iterable[int] = ()) -> None:
        """An order is about to be sent; `slots`: of the step, those that it works for."""
        self._add("q", f"{role}-{rank}", method, *slots)

    def taken(self, role: Role, rank: int, method: str) -> None:
        """The answer to an order was taken."""
        self._add("a", f"{role}-{rank}", method)

    def step_ended(self, index: int) -> None:
        """The update of a step has been sent; called for the step before the first when training begins."""
        self._add("m", index)
        if self._trace is not None:
            self._trace.rest()

    def align(self, executor: Executor, ranks: Iterable[RankPlan]) -> None:
        """Ask every process for its clock; nothing else may be in flight."""
        if self._trace is None:
            return
        for plan in ranks:
            asked = [distance for _ in range(ROUNDS) if (distance := _distance(executor, plan)) is not None]
            if asked:
                doubt, nanoseconds = min(asked)
                if abs(nanoseconds) > doubt:
                    self._trace.add("o", f"{plan.role}-{plan.rank}", nanoseconds)

    def __enter__(self) -> ControllerTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spans is None or self._run_dir is None:
            return
        self._spans.close()
        timeline = read_timeline(self._run_dir)
        if timeline is not None:
            write_chrome_trace(timeline, self._run_dir / TRACE_FILE)

    def _add(self, *event: str | int) -> None:
        if self._trace is not None:
            self._trace.add(*event, time.monotonic_ns())


def _distance(executor: Executor, plan: RankPlan) -> tuple[int, int] | None:
    """Half of the time that asking took, and how far the other clock is ahead, in nanoseconds; None without answer."""
    before = time.monotonic_ns()
    executor.submit(plan.role, plan.rank, "clock")
    answer = executor.next(ANSWER_SECONDS)
    after = time.monotonic_ns()
    if answer is None or answer.error is not None or answer.method != "clock":
        return None
    return (after - before) // 2, answer.value - (before + after) // 2
