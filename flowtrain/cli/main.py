"""The `flowtrain` command: parse first, import later.

One module a subcommand, each with `register(app)`; a subcommand imports what it needs when it runs, so that `--help`
and a wrong option cost no more than this file (contract C14).
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from flowtrain.cli import failure
from flowtrain.cli.options import Debug
from flowtrain.telemetry.streams import give_up, open_standard

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
    failure.raise_on_signals()
    try:
        make_app()()
        code = 0
    except SystemExit:
        raise
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is wrong, and flushing at exit must not fail again.
        give_up(sys.stdout)
        code = 0
    except BaseException as error:
        code = failure.report(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
