"""`flowtrain dashboard RUN_DIR`: a page that shows a run, finished or live; two or more are laid over each other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from flowtrain.cli.options import Debug
from flowtrain.errors import EXIT_BUG, ConfigError

MOST_RUNS = 4
"""More lines of one colour cannot be told apart."""


def register(app: typer.Typer) -> None:
    app.command("dashboard")(dashboard)


def dashboard(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="Folders of runs, finished or live.")],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback a token is asked for.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8080,
    debug: Debug = False,
) -> None:
    """Serve a page that shows runs, until Ctrl-C."""
    if len(run_dirs) > MOST_RUNS:
        raise ConfigError(f"{len(run_dirs)} folders given: {MOST_RUNS} runs can be compared at most")
    from flowtrain.telemetry.dashboard.serve import serving

    ended = threading.Event()
    with serving(run_dirs, host, port, ended=ended) as address:
        typer.echo(f"dashboard: {address}")
        typer.echo("Ctrl-C ends it.", err=True)
        ended.wait()
        raise typer.Exit(EXIT_BUG)  # a signal raises; the server has told why it ended
