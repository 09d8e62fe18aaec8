"""`flowtrain profile`: measure encoder and backbone on this machine, so that a plan can be made from figures.

load ▶ RUN_DIR-profile ▶ driver: one process, then one of each side ▶ profile file ▶ table, predicted rates
 2           2                              any                           (exit code when refused there)
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowtrain.cli import failure
from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides

if TYPE_CHECKING:
    from flowtrain.allocator.predict import Prediction
    from flowtrain.allocator.profile import Profile
    from flowtrain.config.schema import Config

LIMIT_SECONDS = 90.0
PATIENCE_SECONDS = 30.0


def register(app: typer.Typer) -> None:
    app.command("profile", short_help="Measure the modules on this machine, for plans.")(profile)


def profile(
    path: ConfigFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The profile; default: profile.yaml beside the config.")
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", min=10.0, metavar="SECONDS", help="Most time, the start of processes included.")
    ] = LIMIT_SECONDS,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure encoder and backbone alone, both at once, and in one process, and write a profile."""
    from flowtrain.config.loading import load_config

    config = load_config(path, overrides or ()).config
    target = (out or path.with_name("profile.yaml")).absolute()
    code = measure(config, target, limit)
    if code:
        raise typer.Exit(code)
    from flowtrain.allocator.profile import read_profile

    found = read_profile(target)
    predicted = predictions(found, config)
    _report(found, predicted)
    typer.echo(f"wrote {target}")
    if json_file is not None:
        from flowtrain.cli.rundir import write_json

        rates = {
            name: {"samples_per_second": p.samples_per_second, "step_seconds": p.step_seconds}
            for name, p in predicted.items()
        }
        result: dict[str, Any] = {"profile": found.model_dump(mode="json"), "predicted": rates}
        write_json(json_file, result)


def is_current(path: Path, config: Config) -> bool:
    """Whether the file is a profile that this config can use, of this machine."""
    from flowtrain.allocator import local_inventory
    from flowtrain.allocator.profile import check_profile, other_machine, read_profile
    from flowtrain.errors import ConfigError

    try:
        found = read_profile(path)
        check_profile(found, config, path)
    except ConfigError:
        return False
    return other_machine(found, local_inventory()) is None


def measure(config: Config, target: Path, limit_seconds: float = LIMIT_SECONDS) -> int:
    """Write a profile to `target` in processes of their own; returns the exit code, the last line being printed."""
    from flowtrain.cli.outcome import outcome_of, told
    from flowtrain.cli.rundir import open_run_dir, writing
    from flowtrain.cli.supervise import supervise
    from flowtrain.config.loading import dump_resolved
    from flowtrain.telemetry.fatal import clear_error
    from flowtrain.telemetry.files import write_atomic

    folder = config.run.dir.with_name(f"{config.run.dir.name}-profile").absolute()
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder, "trace": False})})
    inputs = [read for read in (config.model.path, config.data.train, config.data.eval) if read is not None]
    run_dir = open_run_dir(folder, inputs, keep=(folder / "config.yaml").is_file())
    try:
        failure.run_dir.set(folder)
        with writing(folder):
            clear_error(folder)
            write_atomic(folder / "config.yaml", dump_resolved(config))
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "flowtrain.runtime.driver", "--config", str(folder / "config.yaml")]
        argv += ["--profile", str(target), "--limit-seconds", str(limit_seconds)]
        ended = supervise(argv, uuid.uuid4().hex, os.environ, PATIENCE_SECONDS, pass_fds=[run_dir.lock])
        outcome = outcome_of(ended, folder)
    finally:
        run_dir.close()
    if not outcome.exit_code:
        shutil.rmtree(folder, ignore_errors=True)
    return told(outcome)


def predictions(profile: Profile, config: Config) -> dict[str, Prediction]:
    """Rates of the two ways in which one machine can run one producer and one consumer."""
    from flowtrain.allocator import local_inventory
    from flowtrain.allocator.predict import Setup, predict

    cores = local_inventory().cpus
    apart = {stage.role: stage for stage in profile.stages if not stage.colocated}
    threads = [apart[role].threads if role in apart else 1 for role in ("producer", "consumer")]
    on_cpu = all(stage.device == "cpu" for stage in profile.stages)
    together = max(stage.threads for stage in profile.stages if stage.colocated)
    return {
        "colocated": predict(profile, Setup(True, 1, together, 1, together, cores, on_cpu)),
        "1 producer, 1 consumer": predict(profile, Setup(False, 1, threads[0], 1, threads[1], cores, on_cpu)),
    }


def _report(profile: Profile, predicted: dict[str, Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"measured on {profile.made.device}, {profile.made.cores} cores", title_justify="left")
    for name in ("side", "threads", "measured", "orders", "GFLOP an order", "ms an order", "spread"):
        table.add_column(name, justify="left" if name in ("side", "measured") else "right")
    for stage in profile.stages:
        how = "one process" if stage.colocated else "both at once" if stage.together else "alone"
        for part, curve in (("", stage.forward), (" backward", stage.backward)):
            for point in curve:
                table.add_row(
                    stage.role + part,
                    str(stage.threads),
                    how,
                    str(point.num),
                    f"{point.work / 1e9:.2f}",
                    f"{1000 * point.seconds:.1f}",
                    f"{100 * point.spread:.0f} %",
                )
    console.print(table)
    for name, found in predicted.items():
        typer.echo(f"{name}: {found.samples_per_second:.1f} samples/s predicted ({found.step_seconds:.2f} s a step)")
