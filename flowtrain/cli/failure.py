"""How a command ends when it cannot do what was asked: one last line on stderr and the exit code of contract C11.

| what | exit code | traceback |
|---|---|---|
| `FlowTrainError`: understood, about config, data, plan or a process | its own | with `--debug` |
| a path that this user may not use (`PermissionError`) | 2 | with `--debug` |
| a full disk | 4 | with `--debug` |
| anything else: our bug | 1 | in a file that the line names; on stderr with `--debug` |

As a job of a cluster a command is read by its log alone: there one record of how it ended goes in front of the line.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from flowtrain.errors import EXIT_BUG, ConfigError, FlowTrainError, Interrupted, Terminated
from flowtrain.telemetry.fatal import understood
from flowtrain.telemetry.streams import tell

JOB = "FLOWTRAIN_JOB"
"""Set in the environment of a command that was submitted as a job."""

JOB_END = "flowtrain-job-end "
"""Begins the record: JSON with `exit`, `line` (or null) and `result` (what `--json` writes, or null)."""

debug: ContextVar[bool] = ContextVar("debug", default=False)
"""Whether the user asked for tracebacks."""

run_dir: ContextVar[Path | None] = ContextVar("run_dir", default=None)
"""Folder of the run that the command is about, once known: a traceback goes there."""


def raise_on_signals() -> None:
    """SIGINT and SIGTERM end a command as an understood error: every `finally` runs, and the exit code is right."""
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise Interrupted("interrupted (SIGINT)")
    raise Terminated("terminated (SIGTERM)")


def report(error: BaseException) -> int:
    """Print the last line for `error` and return the exit code; never raises."""
    if debug.get():
        tell("".join(traceback.format_exception(error)), end="")
    if isinstance(error, PermissionError) and error.filename is not None:
        where = os.fsdecode(error.filename)
        error = ConfigError(f"{where}: {error.strerror}; give a path that you may use, or change its rights")
    error = understood(error)
    if isinstance(error, FlowTrainError):
        last_line(str(error), error.exit_code)
        return error.exit_code
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    what = " ".join(str(error).split())
    line = f"internal error {type(error).__name__}{where}: {what}; this is a bug, please report it"
    file = _write_traceback(error)
    last_line(f"{line} (traceback: {file})" if file else line, EXIT_BUG)
    return EXIT_BUG


def last_line(line: str | None, exit_code: int, result: Mapping[str, Any] | None = None) -> None:
    """Print the last line of a command; where it is a job, the record of its end in front of it. `result`: what
    `--json` writes."""
    if JOB in os.environ:
        record = {"exit": exit_code, "line": line, "result": result}
        tell(f"{JOB_END}{json.dumps(record)}")
    if line:
        tell(line)


def _write_traceback(error: BaseException) -> Path | None:
    text = "".join(traceback.format_exception(error))
    folder = run_dir.get()
    try:
        if folder is not None and folder.is_dir():
            path = folder / "launcher-traceback.txt"
            path.write_text(text, encoding="utf-8")
            return path
        with tempfile.NamedTemporaryFile(
            "w", prefix="flowtrain-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
            return Path(file.name)
    except OSError:
        tell(text, end="")
        return None
