"""`flowtrain bench`: the same training by several modes, in turns, against the limits that one of the runs shows.

    all modes checked ──▶ for each round, for each mode: launch in RUN_DIR-bench/MODE-ROUND ▶ figures
                              └──▶ medians, ratios, limits ▶ page, --json FILE, table

Runs are whole runs in processes of their own (`bench_runs`). When one fails, what the others showed is kept.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli.bench_variants import DEFAULT, VARIANTS, overrides_of
from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides
from flowtrain.errors import ConfigError

if TYPE_CHECKING:
    from flowtrain.cli.bench_result import Spread
    from flowtrain.cli.bench_runs import Measured
    from flowtrain.cli.report import Report
    from flowtrain.telemetry.timeline import Timeline

PAGE = "bench.html"
MODES_HELP = f"What to compare: {', '.join(VARIANTS)}; NAME+KEY=VALUE is NAME with another value of a key."

READY = "without_pool"
"""The variant whose consumers have all features of a step before its first pack."""


@dataclass(frozen=True, slots=True)
class Bench:
    """`measured`: of the runs; `settings`: of the benchmark."""

    measured: Measured
    settings: dict[str, Any]

    @property
    def runs(self) -> dict[str, list[dict[str, float]]]:
        return self.measured.runs

    @property
    def reports(self) -> dict[str, tuple[Report, Timeline]]:
        return self.measured.reports

    @property
    def schedules(self) -> dict[str, list[float]]:
        return self.measured.schedules

    @property
    def incomplete(self) -> str | None:
        """Where the rounds ended early."""
        return None if self.measured.where is None else f"ended early: {self.measured.where}"

    @property
    def reference(self) -> str:
        """The variant that the others are compared with, and whose trace gives the limits."""
        return "flow" if "flow" in self.runs else next(iter(self.runs))

    @property
    def summary(self) -> dict[str, dict[str, Spread]]:
        from flowtrain.cli.bench_result import summarize

        return {name: summarize(runs) for name, runs in self.runs.items()}

    @property
    def limits(self) -> dict[str, float]:
        from flowtrain.cli.bench_result import limits

        fed = self.runs.get(READY)
        return limits(
            self.reports[self.reference][0].breakdown, self.runs[self.reference][-1], fed[-1] if fed else None
        )

    @property
    def ratios(self) -> dict[str, Spread]:
        from flowtrain.cli.bench_result import ratios

        return ratios(self.runs, self.reference)

    @property
    def rates(self) -> list[tuple[str, ...]]:
        """Of every variant, as text: name, rate with spread, ratio, share of its schedule."""
        from flowtrain.cli.bench_result import RATE, spread_of

        ratios, rows = self.ratios, list[tuple[str, ...]]()
        for name, figures in self.summary.items():
            rate = figures[RATE]
            ratio = f"{ratios[name].median:.3f}" if name in ratios else ""
            share = f"{spread_of(self.schedules[name]).median:.3f}" if name in self.schedules else ""
            rows.append((name, f"{rate.median:.2f} ({100 * rate.spread:.0f} %)", ratio, share))
        return rows

    @property
    def rates_of_limits(self) -> list[tuple[str, ...]]:
        """The same of the limits."""
        from flowtrain.cli.bench_result import RATE

        reached = self.summary[self.reference][RATE].median
        return [(name, f"{rate:.2f}", f"{reached / rate:.3f}", "") for name, rate in self.limits.items()]

    @property
    def figures(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Head and rows of a table with a line a figure and a column a variant; what is not known is empty."""
        from flowtrain.cli.bench_result import FIGURES

        of_modes = self.summary
        rows = [
            (metric.name, *(f"{of[metric.name].median:.4g}" if metric.name in of else "" for of in of_modes.values()))
            for metric in FIGURES
        ]
        return ("", *of_modes), rows

    @property
    def peaks(self) -> list[str]:
        """Whose figures the peaks are that MFU is by, a line each; of all variants at once where they agree."""
        by_source: dict[str, list[str]] = {}
        for name, source in self.measured.peaks.items():
            by_source.setdefault(source or "unknown", []).append(name)
        return [f"peak of {', '.join(names)}: {source}" for source, names in by_source.items()]

    def to_dict(self) -> dict[str, Any]:
        from flowtrain.cli.bench_result import loads, spread_of

        return {
            "settings": self.settings,
            "incomplete": self.incomplete,
            "runs": self.runs,
            "modes": {
                name: {figure: asdict(value) for figure, value in figures.items()}
                for name, figures in self.summary.items()
            },
            "limits": self.limits,
            "loads": loads(self.reports[self.reference][0].breakdown),
            "schedule / measured": {name: asdict(spread_of(values)) for name, values in self.schedules.items()},
            f"{self.reference} / other": {name: asdict(value) for name, value in self.ratios.items()},
            "peaks": self.measured.peaks,
            "losses": {name: made.breakdown.losses for name, (made, _) in self.reports.items()},
            "telemetry": {name: made.telemetry_share for name, (made, _) in self.reports.items()},
        }


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    path: ConfigFile,
    overrides: Overrides = None,
    modes: Annotated[str, typer.Option(metavar="NAME,…", help=MODES_HELP)] = DEFAULT,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each run.")] = 12,
    warmup: Annotated[int, typer.Option(min=1, help="First steps of each run that are not measured.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each mode.")] = 3,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure modes against each other and against what the machine could do at best."""
    from flowtrain.cli.bench_runs import check, configs_of, run_all
    from flowtrain.cli.rundir import open_run_dir
    from flowtrain.config.loading import load_config

    names = [name.strip() for name in modes.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--modes {modes}: give names, each once")
    for name in names:
        overrides_of(name, devices=1)
    if warmup >= steps:
        raise ConfigError(f"--warmup {warmup} leaves nothing of --steps {steps}: raise the steps")
    given = load_config(path, overrides or ()).config
    configs = configs_of(path, given, overrides or (), names, steps)
    check(configs)
    how = {"config": str(path), "overrides": tuple(overrides or ()), "steps": steps, "warmup": warmup, "rounds": rounds}
    how["step_rows"] = given.train.step.samples
    folder = given.run.dir.with_name(f"{given.run.dir.name}-bench").absolute()
    held = open_run_dir(folder, keep=True)
    try:
        found = Bench(run_all(configs, folder, warmup, rounds), how)
    finally:
        held.close()
    try:
        _write(found, folder / PAGE, json_file)
    finally:
        _print(found)
    typer.echo(f"\npage: {folder / PAGE}")
    if found.measured.failure is not None:
        raise found.measured.failure


def _write(found: Bench, page: Path, json_file: Path | None) -> None:
    from flowtrain.cli.bench_page import bench_page
    from flowtrain.cli.rundir import write_json, writing
    from flowtrain.telemetry.files import write_atomic

    try:
        if json_file is not None:
            write_json(json_file, found.to_dict())
    finally:
        with writing(page):
            write_atomic(page, bench_page(found))


def _print(found: Bench) -> None:
    from rich.console import Console
    from rich.table import Table

    from flowtrain.cli.bench_result import RATE

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    title = "median of the runs (largest minus smallest, by it)"
    rates = Table(title=title if found.incomplete is None else f"{title}; {found.incomplete}", title_justify="left")
    for name in ("mode", RATE, f"{found.reference} / it", "schedule / it"):
        rates.add_column(name, justify="left" if name == "mode" else "right", overflow="fold")
    for row in found.rates:
        rates.add_row(*row)
    rates.add_section()
    for row in found.rates_of_limits:
        rates.add_row(*row)
    console.print(rates)
    head, rows = found.figures
    figures = Table(title="of the same runs", title_justify="left")
    for number, name in enumerate(head):
        figures.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        figures.add_row(*row)
    console.print(figures)
    for told in found.peaks:
        console.print(told)
