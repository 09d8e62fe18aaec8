"""How a command ends when it cannot do what was asked: one last line on stderr and the exit code of contract C11.

| what | exit code | traceback |
|---|---|---|
| `FlowTrainError`: understood, about config, data, plan or a process | its own | with `--debug` |
| anything else: our bug | 1 | in a file that the line names; on stderr with `--debug` |
"""

from __future__ import annotations

import signal
import sys
import tempfile
import traceback
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

from flowtrain.errors import EXIT_BUG, FlowTrainError, Interrupted, Terminated

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
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, FlowTrainError):
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    what = " ".join(str(error).split())
    line = f"internal error {type(error).__name__}{where}: {what}; this is a bug, please report it"
    file = _write_traceback(error)
    print(f"{line} (traceback: {file})" if file else line, file=sys.stderr, flush=True)
    return EXIT_BUG


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
        traceback.print_exception(error, file=sys.stderr)
        return None
