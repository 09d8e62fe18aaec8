"""`flowtrain launch`: train as a config says, from the check of the config to the last line and the exit code.

    load ▶ plan ▶ RUN_DIR locked, earlier run aside ▶ config.yaml, plan.yaml ▶ driver ▶ sweep ▶ last line, exit code
     2       4            2                                                       any    (exit code when refused there)

Up to the driver neither torch nor Ray is loaded; the launcher stays light and outlives the driver.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli import failure
from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides
from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from flowtrain.allocator import Forecast
    from flowtrain.allocator.profile import Profile
    from flowtrain.config.schema import Config
    from flowtrain.plan import Plan

REPLAY_FILE = "replay.jsonl"

PATIENCE_SECONDS = 60.0
"""Beyond `run.stop_deadline_seconds`, which the driver keeps itself: then it is stuck."""


def register(app: typer.Typer) -> None:
    app.command("launch")(launch)


def launch(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_DIR|latest", help="Go on from the last complete checkpoint of a run."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Repeat a run by its decisions.jsonl: same config, data and seed."),
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Obey a plan that `flowtrain plan` wrote.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL|HOST:PORT",
            help="Dashboard of a Ray cluster to run on as a job, or a cluster that this machine is part of.",
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and leave it to run.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Environment variable of the job; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the plan only.")] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve a page that shows the run while it lives, on loopback.")
    ] = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Train a model as a config says."""
    from flowtrain.cli.job import address_override, as_job, check_visible, joined
    from flowtrain.config.loading import load_config

    given = [*address_override(address), *(overrides or ())]
    try:
        config = load_config(path, given, check_files=False).config
    except ConfigError:
        load_config(path, given)  # tells what is missing beside what is wrong
        raise
    if as_job(config) and not dry_run:
        if dashboard:
            raise ConfigError(
                "--dashboard is for a run on this machine: of a job, `flowtrain dashboard RUN_DIR` where its run.dir is"
            )
        if no_wait and json_file is not None:
            raise ConfigError("--json is written when a job ends, and --no-wait does not wait: leave one of them out")
        raise typer.Exit(_as_job(config, resume, replay, plan_file, no_wait, env or [], json_file))
    if no_wait or env:
        raise ConfigError("--no-wait and --env are for a job: give the dashboard of a cluster (--address URL)")
    if failure.JOB in os.environ:
        check_visible(config)
    config = joined(load_config(path, given).config)  # what the run reads must be here, as the run is
    if plan_file is not None:
        config = _obeyed(config, plan_file)
    if dry_run:
        _show(config, json_file)
        return
    raise typer.Exit(train(config, resume, json_file=json_file, replay=replay, dashboard=dashboard))


def _as_job(
    config: Config,
    resume: str | None,
    replay: Path | None,
    plan_file: Path | None,
    no_wait: bool,
    env: list[str],
    json_file: Path | None,
) -> int:
    """Send the run to the cluster of `cluster.address` and, unless told otherwise, follow it; returns its exit code."""
    from flowtrain.cli.job import environment_of, follow, submit

    assert config.cluster.address is not None
    arguments, files = ["launch", "config.yaml"], {}
    if resume is not None:
        arguments += ["--resume", resume if resume == "latest" else str(Path(resume).expanduser().absolute())]
    if replay is not None:
        arguments += ["--replay", REPLAY_FILE]
        files[REPLAY_FILE] = _read_log(replay)
    if plan_file is not None:
        arguments += ["--plan", "plan.yaml"]
        files["plan.yaml"] = _read_text(plan_file, "--plan", "give a file that `flowtrain plan --out` wrote")
    arguments += ["--debug"] if failure.debug.get() else []
    patience = config.run.stop_deadline_seconds + PATIENCE_SECONDS
    jobs, job_id = submit(config.cluster.address, arguments, config, files, environment_of(env), patience)
    if no_wait:
        typer.echo(job_id)
        return 0
    tell(f"job {job_id} on {jobs.address}")
    stopping = f"it finishes its step and saves, within {config.run.stop_deadline_seconds:g} s"
    return follow(jobs, job_id, stopping, json_file)


def train(
    config: Config,
    resume: str | None = None,
    verify: bool = False,
    json_file: Path | None = None,
    replay: Path | None = None,
    dashboard: bool = False,
) -> int:
    """Run one training in processes of its own and print its last line; returns the exit code.

    `resume`: a run's folder, one of its checkpoints, or `latest`. `verify`: dump gradients and parameters each step.
    `replay`: a decision log to repeat; it may be the one of the run that this one moves aside.
    `dashboard`: serve a page about the run while it lives.
    """
    import shutil

    from flowtrain.cli.outcome import outcome_of, told
    from flowtrain.cli.resume import find_checkpoint, set_newer_aside
    from flowtrain.cli.rundir import open_run_dir, writing
    from flowtrain.cli.supervise import supervise
    from flowtrain.telemetry.fatal import clear_error
    from flowtrain.telemetry.files import write_atomic

    found = find_checkpoint(config.run.dir, resume) if resume is not None else None
    config, plan, expected, notes = plan_run(config)
    log = _read_log(replay) if replay is not None else None
    if found is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": found.run_dir})})
    inputs = [read for read in (config.model.path, config.data.train, config.data.eval) if read is not None]
    run_dir = open_run_dir(config.run.dir, inputs, keep=found is not None)
    spare = os.memfd_create("flowtrain-error")
    try:
        failure.run_dir.set(run_dir.path)
        for note in (*notes, *run_dir.notes, *(found.notes if found else ())):
            tell(note)
        with writing(run_dir.path):
            if found is not None:
                for note in set_newer_aside(found):
                    tell(note)
            clear_error(run_dir.path)
            shutil.rmtree(run_dir.path / "spans", ignore_errors=True)
            _write_files(config, plan, expected, run_dir.path)
            if log is not None:
                write_atomic(run_dir.path / REPLAY_FILE, log)
        argv = [sys.executable, "-m", "flowtrain.runtime.driver", "--config", str(run_dir.path / "config.yaml")]
        argv += ["--resume", str(found.checkpoint)] if found else []
        argv += ["--verify"] if verify else []
        argv += ["--replay", str(run_dir.path / REPLAY_FILE)] if log is not None else []
        argv += ["--spare", str(spare)]
        patience = config.run.stop_deadline_seconds + PATIENCE_SECONDS
        with _dashboard(run_dir.path) if dashboard else nullcontext():
            ended = supervise(argv, uuid.uuid4().hex, os.environ, patience, pass_fds=[run_dir.lock, spare])
        outcome = outcome_of(ended, run_dir.path, spare)
        if json_file is not None and (summary := run_dir.path / "summary.json").is_file():
            with writing(json_file):
                shutil.copyfile(summary, json_file)
    finally:
        os.close(spare)
        run_dir.close()
    return told(outcome, _summary(run_dir.path))


def _summary(run_dir: Path) -> dict[str, Any] | None:
    import json

    try:
        return dict(json.loads((run_dir / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


@contextmanager
def _dashboard(run_dir: Path) -> Iterator[None]:
    from flowtrain.telemetry.dashboard.serve import serving

    with serving([run_dir]) as address:
        tell(f"dashboard: {address}")
        yield


def _read_log(path: Path) -> str:
    """Kept in the run's folder: the log's own may be moved aside, or cut by a resume."""
    return _read_text(path, "--replay", "give the decisions.jsonl of a run")


def _read_text(path: Path, option: str, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}; {hint}") from error


def _obeyed(config: Config, plan_file: Path) -> Config:
    """The config with what a plan file says; refused, with file and line, where this machine cannot run it."""
    from flowtrain.allocator import known_stats, local_inventory, make_plan
    from flowtrain.allocator.planfile import obey, read_plan_file
    from flowtrain.shapes import read_shape

    plan = read_plan_file(plan_file)
    shape = read_shape(config.model.path)
    config = obey(config, plan, shape)
    try:
        make_plan(config, shape, local_inventory(), stats=known_stats(config.data.train))
    except PlanError as error:
        raise PlanError(f"{plan.places['producers.layout']}: the plan does not fit: {error}") from error
    return config


def plan_run(config: Config, may_measure: bool = True) -> tuple[Config, Plan, Forecast | None, tuple[str, ...]]:
    """The config with nothing left open, its plan, what is expected of it, and what was compared to decide."""
    if config.train.step.packs is not None and config.train.max_steps is None:
        raise ConfigError("train.step.packs needs train.max_steps: how many steps an epoch has is not known before")
    from flowtrain.allocator import decide, forecast, known_stats, local_inventory, make_plan
    from flowtrain.allocator.bound import has_open_sizes
    from flowtrain.shapes import check_family, read_shape

    shape = read_shape(config.model.path)
    check_family(shape.family)
    inventory = local_inventory()
    stats = known_stats(config.data.train)
    profile = _profile(config, may_measure)
    decided = decide(config, shape, inventory, stats, profile)
    notes = decided.notes
    if config.cluster.address is not None and config.placement != "colocated" and has_open_sizes(config):
        notes += ("how many processes a side has is open: it is decided once the cluster's nodes are known",)
    plan = make_plan(decided.config, shape, inventory, stats=stats)
    return decided.config, plan, forecast(decided.config, shape, plan, inventory, stats, profile), notes


def _profile(config: Config, may_measure: bool) -> Profile | None:
    """What was measured, where the config asks for it; `auto` measures first where nothing of use is there."""
    if config.allocation.profile == "off":
        return None
    from flowtrain.allocator import local_inventory
    from flowtrain.allocator.profile import check_profile, other_machine, read_profile

    automatic = config.allocation.profile == "auto"
    path = config.run.dir.with_name(f"{config.run.dir.name}-profile.yaml") if automatic else config.allocation.profile
    assert isinstance(path, Path)
    if automatic:
        from flowtrain.cli.profile import is_current, measure

        if not is_current(path, config):
            if not may_measure:
                why = "is missing, or of other settings or another machine"
                tell(f"warning: {path} {why}: launch measures first")
                return None
            if code := measure(config, path):
                raise typer.Exit(code)
    profile = read_profile(path)
    check_profile(profile, config, path)
    if (different := other_machine(profile, local_inventory())) is not None:
        tell(f"warning: {path} was measured on {different}: measure with `flowtrain profile`")
    return profile


def _write_files(config: Config, plan: Plan, expected: Forecast | None, run_dir: Path) -> None:
    import yaml

    from flowtrain.allocator import run_plan_to_dict
    from flowtrain.config.loading import dump_resolved
    from flowtrain.telemetry.files import write_atomic

    write_atomic(run_dir / "config.yaml", dump_resolved(config))
    write_atomic(run_dir / "plan.yaml", yaml.safe_dump(run_plan_to_dict(config, plan, expected), sort_keys=False))


def _show(config: Config, json_file: Path | None) -> None:

    from flowtrain.allocator import describe_plan, local_inventory, plan_warnings, run_plan_to_dict
    from flowtrain.cli.rundir import write_json
    from flowtrain.config.loading import dump_resolved

    config, plan, expected, notes = plan_run(config, may_measure=False)
    for note in notes:
        tell(note)
    typer.echo(dump_resolved(config, comments=True))
    typer.echo(describe_plan(plan))
    if expected is not None:
        typer.echo(f"expected: {expected.samples_per_second:.4g} samples/s (by {expected.by})")
    for warning in plan_warnings(config, plan, local_inventory()):
        tell(f"warning: {warning}")
    if json_file is not None:
        result = {"config": config.model_dump(mode="json"), "plan": run_plan_to_dict(config, plan, expected)}
        write_json(json_file, result)
