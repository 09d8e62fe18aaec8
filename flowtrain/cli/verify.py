"""`flowtrain verify`: prove that the decoupled run computes what one plain Hugging Face process computes (contract C2).

    load ▶ config of the check ▶ launch it, tensors of every step written ▶ reference, same rows ▶ table, verdict
     2                                its own exit code on failure                                   0 or 1

The check has a folder of its own, `RUN_DIR-verify` or `--out`; the folder of an earlier check is replaced. Tensors are
kept when the check fails, for a closer look, and removed when it passes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowtrain.cli import failure
from flowtrain.cli.options import ConfigFile, Debug, JsonFile, Overrides

if TYPE_CHECKING:
    from flowtrain.verify.run import Outcome

RESULT_FILE = "verify.json"
TENSORS_FOLDER = "verify"


def register(app: typer.Typer) -> None:
    app.command("verify", short_help="Prove a run against a plain Hugging Face loop.")(verify)


def verify(
    path: ConfigFile,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Updates to train and compare.")] = 5,
    dtype: Annotated[
        Literal["float64", "float32"], typer.Option("--dtype", help="Rounding hides nothing in float64.")
    ] = "float64",
    overrides: Overrides = None,
    json_file: JsonFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the check; default: RUN_DIR-verify.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train the same rows twice, as configured and by a plain Hugging Face loop, and compare every step."""
    from flowtrain.cli.launch import train
    from flowtrain.config.loading import load_config

    loaded = load_config(path, overrides or ()).config
    folder = (out if out is not None else loaded.run.dir.with_name(f"{loaded.run.dir.name}-verify")).absolute()
    _clear(folder)
    from flowtrain.verify.run import check_config, compare_run

    config = check_config(loaded, steps, dtype, folder)
    typer.echo(f"1/2 the run as configured: {steps} steps in {dtype}, in {folder}")
    code = train(config, verify=True)
    if code:
        raise typer.Exit(code)
    failure.run_dir.set(folder)
    typer.echo("2/2 the same rows, one plain Hugging Face process")
    outcome = compare_run(config, typer.echo)
    _write(outcome, folder, json_file)
    _report(outcome)
    if not outcome.verdict.ok:
        print(outcome.verdict.sentence, file=sys.stderr, flush=True)
        raise typer.Exit(1)
    shutil.rmtree(folder / TENSORS_FOLDER, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Empty the folder of an earlier check that came to its end; anything else is left to the launcher."""
    from flowtrain.cli.rundir import open_run_dir, writing
    from flowtrain.telemetry.running import LOCK_FILE

    if not (folder / RESULT_FILE).is_file():
        return
    earlier = open_run_dir(folder, keep=True)
    try:
        with writing(folder):
            for entry in folder.iterdir():
                if entry.name == LOCK_FILE:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
    finally:
        earlier.close()


def _write(outcome: Outcome, folder: Path, json_file: Path | None) -> None:
    from flowtrain.cli.rundir import writing
    from flowtrain.telemetry.files import write_atomic
    from flowtrain.telemetry.run_files import finite

    text = json.dumps(finite(outcome.to_json()), indent=2, allow_nan=False) + "\n"
    for file in (folder / RESULT_FILE, json_file):
        if file is not None:
            with writing(file):
                write_atomic(file, text)


def _report(outcome: Outcome) -> None:
    from rich.console import Console

    from flowtrain.verify.report import print_outcome

    print_outcome(outcome, Console(width=None if sys.stdout.isatty() else 140))
