"""A small model on eight emulated devices, in this process: nothing waits longer than a test may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.schema import Config
from flowtrain.emulate.case import Case, Variant, write_rows
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.modelled import Modelled
from flowtrain.types import Module

FROZEN = frozenset({Module.ENCODER, Module.PROJECTOR})


@dataclass(frozen=True, slots=True)
class Made:
    """A run that is ready to start."""

    config: Config
    emulation: Emulation

    @property
    def modelled(self) -> Modelled:
        return Modelled(self.config, self.emulation, self.emulation.plan(self.config), self.config.run.dir)


@pytest.fixture
def make(repository: Path, tmp_path: Path) -> Callable[..., Made]:
    """`make(variant, frozen, **emulation)`: sides of copies, so that one thread can be all devices in turn."""

    def of(variant: Variant, frozen: bool = True, steps: int = 3, **scales: Any) -> Made:
        case = Case(
            repository / "examples/plans/qwen2.5-vl-7b",
            repository / "benchmarks/traces/mix_sft_8k.parquet",
            "h100",
            4,
            FROZEN if frozen else frozenset(),
            48,
            8192,
        )
        choices = [
            replace(choice, candidate=replace(choice.candidate, dp_replicate=2, dp_shard=1, tp=1, cp=1, pp=1, vpp=1))
            for choice in case.solve(variant).choices
        ]
        emulation = case.emulation(choices, **{"time_scale": 1e-4, "jitter": 0.05, **scales})
        rows = write_rows(case.rows()[:300], tmp_path / "rows.jsonl")
        return Made(case.config(emulation, variant, rows, tmp_path / "run", steps), emulation)

    return of
