"""The runs of a benchmark: all checked before the first, in turns, and kept when one of them fails.

    configs of all variants ──check──▶ round 1: a b c ▶ round 2: b c a ▶ …       RUN_DIR-bench/MODE-ROUND
                               │                  └─ one fails, or Ctrl-C ──▶ what was measured until then, and why
                               └─ refused: nothing has run

Rounds begin with another variant each, so that a machine that drifts hurts all alike. All runs are traced alike; none
exports, none writes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowtrain.cli.bench_variants import overrides_of
from flowtrain.errors import ConfigError, FlowTrainError, PlanError
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from flowtrain.cli.report import Report
    from flowtrain.config.schema import Config
    from flowtrain.telemetry.timeline import Timeline

FIXED = {
    "train.max_steps": "{steps}",
    "train.epochs": "null",
    "train.eval_every": "null",
    "data.eval": "null",
    "run.trace": "true",
    "run.trace_samples": "true",
    "checkpoint.every": "null",
    "checkpoint.at_end": "false",
    "checkpoint.export": "false",
    "telemetry.progress": "off",
}
"""Keys that a benchmark sets itself, for all runs alike."""


@dataclass(slots=True)
class Measured:
    """`runs`: figures of each run, by variant and round, of variants that have one; `reports`: of each variant's last
    run; `schedules`: by variant and round, seconds of a step by the mode's own schedule over those measured; `peaks`:
    by variant, whose figure its peak FLOP/s is, or why it is not known. `failure`: what ended the rounds early;
    `where`: in which run."""

    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    reports: dict[str, tuple[Report, Timeline]] = field(default_factory=dict)
    schedules: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, str | None] = field(default_factory=dict)
    failure: FlowTrainError | typer.Exit | None = None
    where: str | None = None


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and name of every run.

    >>> list(in_turns(["a", "b"], 2))
    [(1, 'a'), (1, 'b'), (2, 'b'), (2, 'a')]
    """
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number + 1, name


def configs_of(
    path: Path, given: Config, overrides: Sequence[str], names: Sequence[str], steps: int
) -> Mapping[str, Config]:
    """The config of every variant; ConfigError for one that is none."""
    from flowtrain.config.loading import load_config

    _refuse_fixed("--set ", overrides)
    sizes = [side.copies.world_size for side in (given.producers, given.consumers)]
    devices = max(sizes) if given.placement == "colocated" else sum(sizes)
    common = [f"{key}={value.format(steps=steps)}" for key, value in FIXED.items()]
    found = {}
    for name in names:
        _refuse_fixed(f"--modes {name}: ", name.split("+")[1:], "run.dir")
        with _named(name):
            found[name] = load_config(path, (*overrides, *overrides_of(name, devices), *common)).config
    return found


def _refuse_fixed(where: str, overrides: Sequence[str], *more: str) -> None:
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key in FIXED or key in more:
            how = ": use --steps" if key == "train.max_steps" else ""
            raise ConfigError(f"{where}{key} is set by the benchmark itself, for all runs alike{how}")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Says of which variant an error is."""
    try:
        yield
    except FlowTrainError as error:
        raise type(error)(f"{name}: {error}") from error


def check(configs: Mapping[str, Config]) -> None:
    """What would be refused in an hour is refused now, but for variants that measure a profile before they plan."""
    from flowtrain.cli.job import as_job
    from flowtrain.cli.launch import plan_run

    for name, config in configs.items():
        if as_job(config):
            raise ConfigError(
                f"cluster.address: {config.cluster.address}: a benchmark is not sent as a job: give HOST:PORT on a "
                f"node of the cluster, or leave it out to measure this machine"
            )
        if config.allocation.profile != "auto":
            with _named(name):
                plan_run(config)


def run_all(configs: Mapping[str, Config], folder: Path, warmup: int, rounds: int) -> Measured:
    """Train each config `rounds` times. Raises what ended the very first run; later ones leave it in the result."""
    from flowtrain.cli.bench_result import measure
    from flowtrain.cli.launch import train
    from flowtrain.cli.report import read_records, read_report
    from flowtrain.telemetry.metrics import NONFINITE, PEAK_SOURCE

    found = Measured()
    for number, name in in_turns(list(configs), rounds):
        run_dir = folder / f"{name.replace('/', '_')}-{number}"
        run = configs[name].run.model_copy(update={"dir": run_dir})
        config = configs[name].model_copy(update={"run": run})
        try:
            typer.echo(f"round {number} of {rounds}: {name}")
            if code := train(config):
                raise typer.Exit(code)
            records = read_records(run_dir)
            if len(records) < (config.train.max_steps or 0):
                raise PlanError(f"{run_dir} holds the records of {len(records)} steps: free disk space there")
            report = read_report(run_dir, warmup)
        except (FlowTrainError, typer.Exit) as error:
            if not found.runs:
                raise
            found.failure, found.where = error, f"round {number}, {name}"
            return found
        if num := sum(record[NONFINITE.name] for record in records[warmup:]):
            tell(f"warning: {name}: {num} of the steps measured left their update out (loss or gradient not finite)")
        found.runs.setdefault(name, []).append(measure(records, warmup))
        found.reports[name] = report
        found.peaks[name] = records[-1][PEAK_SOURCE.name]
        if (share := _of_schedule(config, *report)) is not None:
            found.schedules.setdefault(name, []).append(share)
    return found


def _of_schedule(config: Config, made: Report, timeline: Timeline) -> float | None:
    """A step by the mode's own schedule, over the step measured; None where there is no model of it."""
    from flowtrain.cli.bench_schedule import scheduled_seconds

    colocated = config.placement == "colocated"
    steps, frozen = made.breakdown.steps, not config.trainable_encoder
    seconds = scheduled_seconds(timeline, steps, config.exchange, colocated, frozen)
    return None if seconds is None else seconds / made.breakdown.step_seconds
