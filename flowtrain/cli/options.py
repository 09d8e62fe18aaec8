"""Options that several subcommands share, so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowtrain.cli import failure


def _set_debug(value: bool) -> bool:
    if value:
        failure.debug.set(True)
    return value


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.lr=2e-5; may be repeated."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Print tracebacks.", show_default=False)]
