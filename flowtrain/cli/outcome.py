"""What a supervised driver leaves: its exit code and the one last line that the user sees (contract C11)."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.cli import failure
from flowtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, LostProcessError
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from flowtrain.cli.supervise import Ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and last line of a run; no line when all went well."""

    exit_code: int
    line: str | None = None
    traceback_file: Path | None = None


def outcome_of(ended: Ended, run_dir: Path, spare: int | None = None) -> Outcome:
    """What to tell: the driver's own words, else what its exit status and the spans that were open say.

    `spare`: where it has left its words if it could not write into `run_dir`.
    """
    from flowtrain.runtime.checkpoints import newest_complete
    from flowtrain.telemetry.fatal import read_error

    if ended.returncode == 0:
        return Outcome(0)
    record = read_error(run_dir, spare)
    if record is not None:
        trace = Path(record.traceback_file) if record.traceback_file else None
        return Outcome(record.exit_code, record.line, trace if trace and trace.is_file() else None)
    doing = _open_spans(run_dir)
    if ended.asked is not None and (ended.killed or ended.returncode < 0):
        name = ended.asked.name
        code = EXIT_INTERRUPTED if ended.asked is signal.SIGINT else EXIT_TERMINATED
        how = f"had to be killed after {name}" if ended.killed else f"was ended at once by {name}"
        newest = newest_complete(run_dir).folder
        way_on = f"go on from {newest.name} with --resume {run_dir}" if newest else "no checkpoint was written"
        return Outcome(code, f"the run {how}{doing}; {way_on}")
    if ended.returncode > 0:
        line = f"the driver ended with exit code {ended.returncode} and left no message; its output is above{doing}"
        return Outcome(ended.returncode, line)
    try:
        name = signal.Signals(-ended.returncode).name
    except ValueError:
        name = f"signal {-ended.returncode}"
    hint = {
        "SIGKILL": "if nobody did it, memory ran out (see dmesg): lower packing.max_tokens or pool.bytes; a run goes "
        f"on with --resume {run_dir}",
        "SIGBUS": "shared memory ran out: lower pool.bytes",
    }.get(name, f"see the output above; a run goes on with --resume {run_dir}")
    return Outcome(LostProcessError.exit_code, f"the driver of {run_dir} was killed by {name}{doing}; {hint}")


def _open_spans(run_dir: Path) -> str:
    """What each process was doing at its death, such as ` (consumer-0: pack > backward)`."""
    from flowtrain.telemetry.spans import read_last_span

    folder = run_dir / "spans"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    spans = [f"{file.name}: {span}" for file in files if (span := read_last_span(file))]
    return f" ({', '.join(spans)})" if spans else ""


def told(outcome: Outcome, result: Mapping[str, Any] | None = None) -> int:
    """Print the last line, and the traceback where the user asked for it; returns the exit code."""
    if outcome.traceback_file is not None and failure.debug.get():
        tell(outcome.traceback_file.read_text(errors="replace"))
    failure.last_line(outcome.line, outcome.exit_code, result)
    return outcome.exit_code
