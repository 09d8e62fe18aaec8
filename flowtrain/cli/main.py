"""The `flowtrain` command: parse first, import later.

One module a subcommand, each with `register(app)`; a subcommand imports what it needs when it runs, so that `--help`
and a wrong option cost no more than this file (contract C14).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TextIO

import typer

from flowtrain.cli import failure
from flowtrain.cli.options import Debug
from flowtrain.telemetry.streams import escape_letters, give_up, open_standard, reader_gone

SUBCOMMANDS = (
    "flowtrain.cli.launch",
    "flowtrain.cli.jobs",
    "flowtrain.cli.plan",
    "flowtrain.cli.simulate",
    "flowtrain.cli.config",
    "flowtrain.cli.data",
    "flowtrain.cli.packing",
    "flowtrain.cli.verify",
    "flowtrain.cli.profile",
    "flowtrain.cli.report",
    "flowtrain.cli.dashboard",
    "flowtrain.cli.bench",
    "flowtrain.cli.evaluate",
    "flowtrain.cli.doctor",
    "flowtrain.cli.pool",
)
"""In the order of `flowtrain --help`."""


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="flowtrain",
        help="Train vision-language models as a producer-consumer dataflow.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def root(debug: Debug = False) -> None:
        """Train vision-language models as a producer-consumer dataflow."""

    for name in SUBCOMMANDS:
        import_module(name).register(app)
    return app


def main() -> None:
    """Entry point of the console script; ends the process with an exit code of contract C11."""
    open_standard()
    escape_letters()
    failure.raise_on_signals()
    code: str | int | None
    stdout, reader = sys.stdout, os.dup(1)  # rich leads 1 to nowhere as soon as it finds the pipe broken
    try:
        make_app()()
        code = 0
    except SystemExit as ended:
        # typer makes 1 of any pipe that breaks, and another stream of stdout.
        code = _of_broken_pipe(ended.__context__, stdout, reader) if _broken(ended.__context__) else ended.code
    except BaseException as error:
        code = _of_broken_pipe(error, stdout, reader) if _broken(error) else failure.report(error)
    try:
        stdout.flush()
    except OSError as error:  # the last of a short output
        code = _of_broken_pipe(error, stdout, reader) if _broken(error) else failure.report(error)
        give_up(stdout)
    sys.exit(code)


def _broken(error: BaseException | None) -> bool:
    return isinstance(error, BrokenPipeError)


def _of_broken_pipe(error: BaseException | None, stdout: TextIO, reader: int) -> int:
    """The exit code where a pipe broke: 0 when it is that of our output, whose reader has seen enough (`| head`).

    `reader`: another descriptor of our output.
    """
    assert error is not None
    if not reader_gone(reader):
        return failure.report(error)
    give_up(stdout)  # flushing at exit must not fail again
    return 0


if __name__ == "__main__":
    main()
