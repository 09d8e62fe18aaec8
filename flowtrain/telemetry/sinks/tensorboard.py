"""Event files for TensorBoard in RUN_DIR/tensorboard: `tensorboard --logdir RUN_DIR/tensorboard`.

Needs the extra `flowtrain[tensorboard]`; its writer alone is used, which loads neither torch nor TensorFlow. A resumed
run adds a file of its own, and TensorBoard shows the newer values of steps that both hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.sinks.prometheus import numbers

FOLDER = "tensorboard"


class TensorBoardSink:
    def __init__(self, config: Config, run_dir: Path) -> None:
        if find_spec("tensorboard") is None:
            raise PlanError(
                "telemetry.sinks names tensorboard, which is not installed: pip install 'flowtrain[tensorboard]', or "
                "leave it out"
            )
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / FOLDER))

    def write(self, record: Mapping[str, Any]) -> None:
        for metric, part, value in numbers(record):
            name = metric.name if part is None else metric.of(part)
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self, in_order: bool) -> None:
        self._writer.close()
