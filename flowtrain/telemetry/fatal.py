"""How a run tells why it ended: one sentence and an exit code in RUN_DIR/error.json, the traceback in a file beside it.

The process that runs the controller writes; the launcher, which outlives it, reads and prints the sentence as the last
line of stderr (contract C11). Within one process the first error stays, because what follows a failure is its echo;
only a `PeerError`, which is never a true cause, gives way. What an earlier run left is replaced. Where the folder
cannot be written, its disk being full or gone, the record goes into memory that the launcher has left open (`spare`).
"""

from __future__ import annotations

import errno
import json
import os
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flowtrain.errors import EXIT_BUG, EXIT_INTERRUPTED, FlowTrainError, Interrupted, PeerError, PlanError, Terminated
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.streams import tell

ERROR_FILE = "error.json"
TRACEBACK_FILE = "error-traceback.txt"


@dataclass(frozen=True, slots=True)
class FatalRecord:
    """What ended a run. `line` is one sentence that names `traceback_file` where there is one."""

    exit_code: int
    line: str
    traceback_file: str | None
    pid: int = 0
    echo: bool = False


def understood(error: BaseException) -> BaseException:
    """The error, or what it is where the operating system says so: a full disk, met anywhere, is no bug of ours."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the output"
    told = PlanError(f"{where} cannot be written: {error.strerror}; free disk space, or choose another place")
    return told.with_traceback(error.__traceback__)


def exit_code_of(error: BaseException) -> int:
    """The exit code of contract C11."""
    error = understood(error)
    if isinstance(error, FlowTrainError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_BUG


def describe(error: BaseException) -> str:
    """The error as one line: an understood one in its own words, any other as the bug that it is."""
    error = understood(error)
    text = " ".join(str(error).split())
    if isinstance(error, FlowTrainError):
        return text or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"internal error {type(error).__name__}{where}: {text}; this is a bug, please report it"


def write_error(run_dir: Path, error: BaseException, spare: int | None = None) -> FatalRecord:
    """Write error.json and the traceback for what ended the run; returns the record that stands.

    A folder that cannot be written does not hide the cause: traceback and line then go to stderr from here, and the
    record into the file descriptor `spare`.
    """
    standing = read_error(run_dir)
    if (
        standing is not None
        and standing.pid == os.getpid()
        and not (standing.echo and not isinstance(error, PeerError))
    ):
        return standing
    line = describe(error)
    trace_path: Path | None = None
    if not isinstance(error, Interrupted | Terminated | KeyboardInterrupt):
        trace_path = run_dir / TRACEBACK_FILE
        line = f"{line} (traceback: {trace_path})"
    record = FatalRecord(
        exit_code_of(error), line, str(trace_path) if trace_path else None, os.getpid(), isinstance(error, PeerError)
    )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if trace_path is not None:
            write_atomic(trace_path, "".join(traceback.format_exception(error)))
        write_atomic(run_dir / ERROR_FILE, json.dumps(asdict(record)) + "\n")
    except OSError as failure:
        tell(f"cannot write {run_dir / ERROR_FILE}: {failure.strerror}")
        tell("".join(traceback.format_exception(error)), end="")
        line = describe(error)
        record = FatalRecord(exit_code_of(error), line, None, os.getpid(), isinstance(error, PeerError))
        tell(line)
        if spare is not None:
            os.pwrite(spare, json.dumps(asdict(record)).encode(), 0)
    return record


def read_error(run_dir: Path, spare: int | None = None) -> FatalRecord | None:
    """What ended the run, or None when nothing was written."""
    with suppress(OSError, ValueError, TypeError):
        return FatalRecord(**json.loads((run_dir / ERROR_FILE).read_bytes()))
    with suppress(OSError, ValueError, TypeError):
        return FatalRecord(**json.loads(os.pread(spare, 1 << 20, 0))) if spare is not None else None
    return None


def clear_error(run_dir: Path) -> None:
    """Remove what an earlier run in this folder left; called before a run starts."""
    for name in (ERROR_FILE, TRACEBACK_FILE):
        (run_dir / name).unlink(missing_ok=True)
