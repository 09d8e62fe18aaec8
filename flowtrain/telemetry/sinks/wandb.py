"""A run of Weights & Biases: `telemetry.wandb_mode: online` sends it, `offline` keeps it in RUN_DIR/wandb for
`wandb sync`. Needs the extra `flowtrain[wandb]`; the key is W&B's own affair (`wandb login`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.sinks.prometheus import numbers


class WandbSink:
    """What a run of W&B is called is what the run's folder is called."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        if find_spec("wandb") is None:
            raise PlanError(
                "telemetry.sinks names wandb, which is not installed: pip install 'flowtrain[wandb]', or leave it out"
            )
        import wandb

        self._run = wandb.init(
            project=config.telemetry.wandb_project,
            name=run_dir.name,
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            mode=config.telemetry.wandb_mode,
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, record: Mapping[str, Any]) -> None:
        values = {metric.name if part is None else metric.of(part): value for metric, part, value in numbers(record)}
        self._run.log(values, step=record["step"])

    def close(self, in_order: bool) -> None:
        self._run.finish(exit_code=0 if in_order else 1)
