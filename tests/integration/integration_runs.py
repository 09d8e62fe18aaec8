"""How the integration tests make the config of a short, quiet run, and read what it has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ("telemetry.progress=off", "checkpoint.export=false", "cluster.oversubscribe=true")

Train = Callable[..., Path]


def make_config(example: str, run_dir: Path, *overrides: str) -> Config:
    """An example's config with a run folder of its own; one thread for each process."""
    path = EXAMPLES / example / f"{example}.yaml"
    return load_config(path, [*QUIET, f"run.dir={run_dir}", *overrides]).config


def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir: Path) -> list[str]:
    """The loss of each step as a hexadecimal float."""
    return [record["loss_hex"] for record in lines(run_dir / "metrics.jsonl")]


def samples(run_dir: Path) -> bytes:
    """The rows of every pack trained, as the run wrote them."""
    return (run_dir / "samples.jsonl").read_bytes()
