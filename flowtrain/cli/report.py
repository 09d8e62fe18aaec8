"""`flowtrain report RUN_DIR`: where a traced run's time went, as tables and as a page that needs no network.

RUN_DIR/traces, config.yaml, summary.json ──▶ RUN_DIR/report.html, --json FILE, tables on the terminal

A run that is still going, or was killed, is told as far as it came.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli.options import Debug, JsonFile
from flowtrain.errors import ConfigError

if TYPE_CHECKING:
    from flowtrain.telemetry.losses import Breakdown
    from flowtrain.telemetry.timeline import Timeline

PAGE = "report.html"
NUM_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Report:
    """`last_step`: of the run, also where the trace ends before it. `telemetry_seconds`: processor time of tracing,
    records and sinks, all processes; `wall_seconds`: the run's."""

    run: str
    breakdown: Breakdown
    last_step: int
    telemetry_seconds: float
    wall_seconds: float | None

    @property
    def telemetry_share(self) -> float | None:
        return self.telemetry_seconds / self.wall_seconds if self.wall_seconds else None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self.breakdown)
        values["path"] = [
            {"side": side, "name": name, "seconds": seconds} for (side, name), seconds in self.breakdown.path.items()
        ]
        telemetry = {"seconds": self.telemetry_seconds, "wall_s": self.wall_seconds, "share": self.telemetry_share}
        return {"run": self.run, **values, "telemetry": telemetry}


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run with run.trace: true.")],
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Tell where a run's time went: shares, the critical path of a step, the largest losses against the ideal."""
    from flowtrain.cli.report_page import page
    from flowtrain.cli.rundir import write_json, writing
    from flowtrain.telemetry.files import write_atomic
    from flowtrain.telemetry.run_files import SUMMARY_FILE
    from flowtrain.telemetry.timeline import TRACE_FILE, write_chrome_trace

    made, timeline = read_report(run_dir)
    try:
        if json_file is not None:
            write_json(json_file, made.to_dict())
        with writing(run_dir / PAGE):
            write_atomic(run_dir / PAGE, page(made, timeline))
        if not ((run_dir / TRACE_FILE).is_file() and (run_dir / SUMMARY_FILE).is_file()):
            with writing(run_dir / TRACE_FILE):  # the run itself writes it at its end
                write_chrome_trace(timeline, run_dir / TRACE_FILE)
    finally:
        _print(made)
    typer.echo(f"\npage: {run_dir / PAGE}   timeline for ui.perfetto.dev: {run_dir / TRACE_FILE}")


def read_report(run_dir: Path, warmup: int = 1) -> tuple[Report, Timeline]:
    """Without the first `warmup` steps. ConfigError for a folder without a trace of a whole step."""
    from flowtrain.config.loading import load_config
    from flowtrain.telemetry.losses import break_down
    from flowtrain.telemetry.metrics import STEP, TELEMETRY_SECONDS
    from flowtrain.telemetry.run_files import SUMMARY_FILE
    from flowtrain.telemetry.timeline import read_timeline

    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder: give that of a run (run.dir)")
    timeline = read_timeline(run_dir)
    if timeline is None:
        raise ConfigError(f"{run_dir} holds no trace: run it with --set run.trace=true")
    colocated = load_config(run_dir / "config.yaml", check_files=False).config.placement == "colocated"
    breakdown = break_down(timeline, colocated, warmup)
    if breakdown is None:
        raise ConfigError(f"the trace of {run_dir} holds no whole step: let the run end two steps at least")
    records = read_records(run_dir)
    seconds = breakdown.cost_seconds + sum(record.get(TELEMETRY_SECONDS.name) or 0.0 for record in records)
    last = max((record[STEP.name] for record in records), default=breakdown.steps[-1])
    return Report(run_dir.resolve().name, breakdown, last, seconds, _wall_seconds(run_dir / SUMMARY_FILE)), timeline


def _wall_seconds(summary: Path) -> float | None:
    """None while the run is going, and where it was killed."""
    try:
        found = json.loads(summary.read_text(encoding="utf-8"))["wall_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int | float) else None


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds; a line torn by a kill or by a full disk is left out."""
    from flowtrain.telemetry.metrics import STEP
    from flowtrain.telemetry.run_files import METRICS_FILE

    file = run_dir / METRICS_FILE
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get(STEP.name), int):
            found.append(record)
    return found


def headline(made: Report) -> list[tuple[str, str]]:
    """What the report says in figures: (name, value)."""
    found = made.breakdown
    short = found.steps[-1] < made.last_step
    cut = f" of {made.last_step}, where the trace of a process ends" if short else ""
    lines = [
        ("steps looked at", f"{found.steps[0]}-{found.steps[-1]}{cut}"),
        ("a step", f"{1000 * found.step_seconds:.1f} ms"),
        ("ideal", f"{1000 * found.ideal_seconds:.1f} ms, {100 * found.ideal_seconds / found.step_seconds:.1f} % of it"),
    ]
    if made.telemetry_share is not None:
        share = 100 * made.telemetry_share
        lines.append(("telemetry", f"{made.telemetry_seconds:.2f} s of processor time, {share:.2f} % of the run"))
    return lines


def _print(made: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    found = made.breakdown
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for name, value in headline(made):
        typer.echo(f"{name}: {value}")

    def show(title: str, rows: list[tuple[str, float]], whole: float) -> None:
        table = Table(title=title, title_justify="left")
        table.add_column("what")
        table.add_column("ms a step", justify="right")
        table.add_column("of the step", justify="right")
        for name, seconds in rows:
            table.add_row(name, f"{1000 * seconds:.1f}", f"{100 * seconds / whole:.1f} %")
        console.print(table)

    losses = list(found.losses.items())[:NUM_LOSSES]
    show(f"the {len(losses)} largest losses against the ideal, a device", losses, found.step_seconds)
    path = [(f"{side}: {name}", seconds) for (side, name), seconds in found.path.items()]
    show("critical path of a step, mean over the steps", path, found.step_seconds)
    table = Table(title="share of each side's time", title_justify="left")
    for name in ("side", "what"):
        table.add_column(name)
    table.add_column("share", justify="right")
    for side, shares in found.shares.items():
        for number, (name, share) in enumerate(shares.items()):
            table.add_row("" if number else side, name, f"{100 * share:.1f} %")
        table.add_section()
    console.print(table)
