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


def _check_json(path: Path | None) -> Path | None:
    """What a command found in an hour must not be lost for want of a folder."""
    if path is not None:
        from flowtrain.cli.rundir import check_place

        check_place(path)
    return path


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.lr=2e-5; may be repeated."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.", callback=_check_json)
]
Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Print tracebacks.", show_default=False)]

# What `plan` and `simulate` ask about devices and models that need not be here.
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes.")]
DevicesPerNode = Annotated[
    int | None, typer.Option("--devices-per-node", min=1, help="Devices of a node; default: the device's usual.")
]
Policy = Annotated[str | None, typer.Option("--policy", metavar="NAME", help="Who divides the devices.")]
Freeze = Annotated[
    list[str] | None, typer.Option("--freeze", metavar="MODULE", help="encoder, projector, backbone (MODEL_DIR).")
]
StepSamples = Annotated[int | None, typer.Option("--step-samples", min=1, help="Samples of a step (MODEL_DIR).")]
PackTokens = Annotated[
    list[int] | None, typer.Option("--pack-tokens", min=1, help="Most tokens of a pack, choices (MODEL_DIR).")
]
ComputeDtype = Annotated[str | None, typer.Option("--dtype", help="Compute dtype; default: the config's, or bf16.")]
