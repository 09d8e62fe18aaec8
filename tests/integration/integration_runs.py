"""How the integration tests make the config of a short, quiet run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ("telemetry.progress=off", "checkpoint.export=false", "cluster.oversubscribe=true")

Train = Callable[..., Path]


def make_config(example: str, run_dir: Path, *overrides: str) -> Config:
    """An example's config with a run folder of its own; one thread for each process."""
    path = EXAMPLES / example / f"{example}.yaml"
    return load_config(path, [*QUIET, f"run.dir={run_dir}", *overrides]).config
