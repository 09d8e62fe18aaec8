"""A timeline of spans in Chrome's trace format (`run.trace`): one file a process, joined to RUN_DIR/trace.json.

Open it in `chrome://tracing` or Perfetto: one row a process, one box a span.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.run_files import JsonLines

TRACE_FOLDER = "traces"
TRACE_FILE = "trace.json"


class TraceFile:
    """Spans of one process. `name` labels its row; `row` is its place in the picture."""

    def __init__(self, run_dir: Path, name: str, row: int) -> None:
        self._row = row
        self._lines = JsonLines(run_dir / TRACE_FOLDER / f"{name}.jsonl", None)
        self._lines.write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})

    def span(self, name: str, start: float, seconds: float) -> None:
        """One finished span; `start` in seconds since the epoch, so that rows of one machine line up."""
        event = {"name": name, "ph": "X", "pid": self._row, "tid": 0, "ts": start * 1e6, "dur": seconds * 1e6}
        self._lines.write(event)

    def close(self) -> None:
        self._lines.close()


def join_traces(run_dir: Path) -> Path | None:
    """Write RUN_DIR/trace.json from the processes' files; None when there are none. Torn last lines are left out."""
    events: list[dict[str, Any]] = []
    files = sorted((run_dir / TRACE_FOLDER).glob("*.jsonl"))
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    if not files:
        return None
    path = run_dir / TRACE_FILE
    write_atomic(path, json.dumps({"traceEvents": events}))
    return path
