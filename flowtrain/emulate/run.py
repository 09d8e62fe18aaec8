"""One emulated run, and what it measured beside what its schedule alone would take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.executor import EmulatedExecutor
from flowtrain.emulate.meeting import make_boards
from flowtrain.runtime.executor import Executor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import Role

STEP_SECONDS = "time_metrics/end_to_end(s)"


def emulate(
    config: Config,
    emulation: Emulation,
    executor: EmulatedExecutor,
    *,
    resume: Path | None = None,
    stop: StopRequest | None = None,
    metered: Executor | None = None,
) -> Path:
    """Run to the end on devices that `executor` stands for; returns the run's folder.

    `metered`: an executor around that one, through which the run makes its calls.
    """
    run_dir = config.run.dir
    run_dir.mkdir(parents=True, exist_ok=True)
    emulation.write(run_dir)
    plan = emulation.plan(config)
    make_boards(run_dir, {Role.PRODUCER: plan.producers.layout, Role.CONSUMER: plan.consumers.layout})
    executor.take(plan)
    asked = stop or StopRequest(deadline_seconds=config.run.stop_deadline_seconds)
    execute(config, run_dir, resume, asked, executor=metered or executor, shape=emulation.shape, plan=plan)
    return run_dir


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of a run that is done. `records`: lines of metrics.jsonl, one a step."""

    records: list[dict[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> Measured:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return cls([json.loads(line) for line in lines])

    def seconds(self, skipped: int) -> float:
        """Of the steps behind the first `skipped` ones."""
        return sum(float(record[STEP_SECONDS]) for record in self.records[skipped:])


def packs_of(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: the rows of every pack, in the order of steps."""
    lines = (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
