"""What the user watches: one line that moves on a terminal, one line a step elsewhere.

| kind | a step | a line of text |
|---|---|---|
| `rich` | a live bar: step, loss, tokens/s, MFU, pool, starvation, time left | printed above the bar |
| `plain` | the same as one line | printed |
| `off` | nothing | printed (warnings are not silenced) |
| `auto` | `rich` on a terminal that can move its cursor (TERM is not `dumb`), else `plain` | |

A terminal or pipe that goes away is given up with one warning on stderr: the run does not depend on being watched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from flowtrain.telemetry.metrics import LOSS, METRICS, STEP_SECONDS
from flowtrain.telemetry.streams import give_up, tell

SMOOTHING = 0.1
"""Share of the newest step in the step time that the time left is reckoned with."""

WIDE = 110
"""Columns of a terminal from which on there is room for a bar beside the numbers."""

Kind = Literal["auto", "rich", "plain", "off"]


class Progress:
    """Shows a run's steps. `record`s are those of metrics.jsonl."""

    def __init__(self, kind: Kind, total_steps: int, file: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self._file = file or sys.stdout
        self._step_seconds: float | None = None
        self._broken = False
        moves = self._file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        self.kind = ("rich" if moves else "plain") if kind == "auto" else kind
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        if self.kind == "rich":
            console = Console(file=self._file, highlight=False, markup=False, emoji=False)
            line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            columns = (line, BarColumn(20)) if console.width >= WIDE else (line,)
            self._bar = Bar(*columns, console=console, auto_refresh=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """One step is done."""
        seconds = float(record[STEP_SECONDS.name])
        before = self._step_seconds
        self._step_seconds = seconds if before is None else before + SMOOTHING * (seconds - before)
        left = (self.total_steps - int(record["step"])) * self._step_seconds
        text = f"step {record['step']}/{self.total_steps}  {format_seconds(left)} left  {describe_step(record)}"
        if self._bar is not None:
            self._show(int(record["step"]), text)
        elif self.kind == "plain":
            self._print(text)

    def line(self, text: str) -> None:
        """A line, or several, that stays."""
        bar = self._bar
        if bar is not None and self._task is not None:
            self._guarded(lambda: bar.console.print(text, soft_wrap=True))
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None and self._task is not None:
            self._guarded(bar.stop)

    def _show(self, step: int, text: str) -> None:
        bar = self._bar
        assert bar is not None
        if self._task is None:
            self._task = bar.add_task(text, total=self.total_steps)
            self._guarded(bar.start)
        bar.update(self._task, completed=step, description=text)
        self._guarded(bar.refresh)

    def _print(self, text: str) -> None:
        self._guarded(lambda: print(text, file=self._file, flush=True))

    def _guarded(self, write: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            self._broken = True
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        tell(f"warning: progress cannot be shown any more ({error})")
        if self._file is sys.stdout:
            give_up(self._file)  # what is still buffered would fail again when the process flushes at its end


def describe_step(record: Mapping[str, Any]) -> str:
    """The step's numbers in one line, as the table of metrics says; what is not known is left out."""
    parts = []
    for metric in METRICS:
        value = record.get(metric.name)
        if metric.console is None or (value is None and metric is not LOSS):
            continue
        parts.append("loss none" if value is None else metric.console.format(value))
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """`3725` as `1:02:05`, `65` as `1:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
