"""`flowtrain bench`: the same training by several modes, in turns, against the limits that one of the runs shows.

    for each round, for each mode: launch in RUN_DIR-bench/MODE-ROUND ▶ figures ──▶ medians, ratios, limits ▶ table,
                                                                                    page, --json FILE

Runs are whole runs in processes of their own. Rounds take the modes in turns, so that a machine that drifts hurts all
alike. All runs are traced alike; none exports.
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
    from flowtrain.cli.report import Report
    from flowtrain.config.schema import Config
    from flowtrain.telemetry.timeline import Timeline

PAGE = "bench.html"
MODES_HELP = f"What to compare: {', '.join(VARIANTS)}; NAME+KEY=VALUE is NAME with another value of a key."

READY = "without_pool"
"""The variant whose consumers have all features of a step before its first pack."""


@dataclass(frozen=True, slots=True)
class Bench:
    """`runs`: figures of each run, by variant and round; `reports`: of each variant's last run; `schedules`: by variant
    and round, seconds of a step by the mode's own schedule over those measured."""

    runs: dict[str, list[dict[str, float]]]
    reports: dict[str, tuple[Report, Timeline]]
    schedules: dict[str, list[float]]
    settings: dict[str, Any]

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

    def to_dict(self) -> dict[str, Any]:
        from flowtrain.cli.bench_result import loads, spread_of

        return {
            "settings": self.settings,
            "runs": self.runs,
            "modes": {
                name: {figure: asdict(value) for figure, value in figures.items()}
                for name, figures in self.summary.items()
            },
            "limits": self.limits,
            "loads": loads(self.reports[self.reference][0].breakdown),
            "schedule / measured": {name: asdict(spread_of(values)) for name, values in self.schedules.items()},
            f"{self.reference} / other": {name: asdict(value) for name, value in self.ratios.items()},
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
    from flowtrain.cli.bench_page import bench_page
    from flowtrain.cli.rundir import write_json, writing
    from flowtrain.telemetry.files import write_atomic

    names = [name.strip() for name in modes.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--modes {modes}: give names, each once")
    for name in names:
        overrides_of(name, devices=1)
    if warmup >= steps:
        raise ConfigError(f"--warmup {warmup} leaves nothing of --steps {steps}: raise the steps")
    found, folder = _run_all(path, tuple(overrides or ()), names, steps, warmup, rounds)
    _print(found)
    with writing(folder / PAGE):
        write_atomic(folder / PAGE, bench_page(found))
    typer.echo(f"\npage: {folder / PAGE}")
    if json_file is not None:
        write_json(json_file, found.to_dict())


def _run_all(
    path: Path, overrides: tuple[str, ...], names: list[str], steps: int, warmup: int, rounds: int
) -> tuple[Bench, Path]:
    from flowtrain.cli.bench_result import measure
    from flowtrain.cli.launch import train
    from flowtrain.cli.report import read_records, read_report
    from flowtrain.config.loading import load_config

    given = load_config(path, overrides).config
    sizes = [side.copies.world_size for side in (given.producers, given.consumers)]
    devices = max(sizes) if given.placement == "colocated" else sum(sizes)
    folder = given.run.dir
    folder = folder.with_name(f"{folder.name}-bench").absolute()
    common = (
        f"train.max_steps={steps}",
        "train.epochs=null",
        "train.eval_every=null",
        "data.eval=null",
        "run.trace=true",
        "run.trace_samples=true",
        "checkpoint.every=null",
        "checkpoint.export=false",
        "telemetry.progress=off",
    )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    schedules: dict[str, list[float]] = {name: [] for name in names}
    reports = {}
    for number in range(1, rounds + 1):
        for name in names:
            run_dir = folder / f"{name.replace('/', '_')}-{number}"
            settings = (*overrides, *common, *overrides_of(name, devices), f"run.dir={run_dir}")
            typer.echo(f"round {number} of {rounds}: {name}")
            config = load_config(path, settings).config
            if code := train(config):
                raise typer.Exit(code)
            runs[name].append(measure(read_records(run_dir), warmup))
            reports[name] = read_report(run_dir, warmup)
            if (share := _of_schedule(config, *reports[name])) is not None:
                schedules[name].append(share)
    how = {"config": str(path), "overrides": overrides, "steps": steps, "warmup": warmup, "rounds": rounds}
    how["step_rows"] = given.train.step.samples
    return Bench(runs, reports, {name: values for name, values in schedules.items() if values}, how), folder


def _of_schedule(config: Config, made: Report, timeline: Timeline) -> float | None:
    """A step by the mode's own schedule, over the step measured; None where there is no model of it."""
    from flowtrain.cli.bench_schedule import scheduled_seconds

    colocated = config.placement == "colocated"
    steps, frozen = made.breakdown.steps, not config.trainable_encoder
    seconds = scheduled_seconds(timeline, steps, config.exchange, colocated, frozen)
    return None if seconds is None else seconds / made.breakdown.step_seconds


def _print(found: Bench) -> None:
    from rich.console import Console
    from rich.table import Table

    from flowtrain.cli.bench_result import FIGURES, RATE, spread_of

    console = Console(width=None if sys.stdout.isatty() else 250, highlight=False)
    table = Table(title="median of the runs (largest minus smallest, by it)", title_justify="left")
    for name in ("mode", RATE, f"{found.reference} / it", "schedule / it", *(metric.name for metric in FIGURES)):
        table.add_column(name, justify="left" if name == "mode" else "right")
    ratios = found.ratios
    for name, figures in found.summary.items():
        rate = figures[RATE]
        cells = [name, f"{rate.median:.2f} ({100 * rate.spread:.0f} %)"]
        cells.append(f"{ratios[name].median:.3f}" if name in ratios else "")
        cells.append(f"{spread_of(found.schedules[name]).median:.3f}" if name in found.schedules else "")
        cells += [f"{figures[metric.name].median:.3g}" if metric.name in figures else "" for metric in FIGURES]
        table.add_row(*cells)
    table.add_section()
    for name, rate_of_limit in found.limits.items():
        ratio = found.summary[found.reference][RATE].median / rate_of_limit
        table.add_row(name, f"{rate_of_limit:.2f}", f"{ratio:.3f}", "", *("" for _ in FIGURES))
    console.print(table)
