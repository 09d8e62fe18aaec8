"""`flowtrain verify`: the same rows trained twice, as configured and by the reference, then compared.

    config ─▶ config of the check ─▶ launch ─▶ FOLDER/{metrics,samples}.jsonl, FOLDER/verify/step-N ─┐
                                        │                                                            ▼
                                        └─ weights, rows of each step ─▶ Reference ─ step by step ─ compare ─▶ Verdict

The run is a real one, started as `flowtrain launch` starts it; only what has no part in the arithmetic is switched off.
A fault planted by `debug.faults` acts in the run; the reference does not know of it. Tensors of one step are in memory
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.verify.compare import LIMITS, Check, compare_step, limits_of
from flowtrain.verify.record import RecordedRun
from flowtrain.verify.reference import Reference
from flowtrain.verify.rows import find_rows
from flowtrain.verify.verdict import Verdict, judge

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Every comparison made, and what follows from them."""

    verdict: Verdict
    checks: tuple[Check, ...]
    steps: int
    rows: int
    dtype: str
    parameters: int = 0
    weights: str = ""
    faults: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        verdict = self.verdict
        return {
            "ok": verdict.ok,
            "verdict": verdict.sentence,
            "step": verdict.step,
            "quantity": verdict.quantity,
            "modules": [module.value for module in verdict.modules],
            "dtype": self.dtype,
            "steps": self.steps,
            "rows": self.rows,
            "parameters": self.parameters,
            "faults": list(self.faults),
            "largest": largest(self.checks),
            "checks": [
                {
                    "name": check.name,
                    "step": check.step,
                    "value": check.value,
                    "op": "<=",
                    "limit": check.limit,
                    "ok": check.ok,
                    "note": check.note,
                }
                for check in self.checks
            ],
        }


def largest(checks: Sequence[Check]) -> dict[str, float]:
    """Name of a quantity and its module → the largest difference over all steps."""
    result: dict[str, float] = {}
    for check in checks:
        result[check.name] = max(result.get(check.name, 0.0), check.shown)
    return result


def check_config(config: Config, steps: int, dtype: str, folder: Path) -> Config:
    """The config of the run that is checked: `steps` updates in `dtype`, without evaluation, checkpoints and export."""
    if dtype not in LIMITS:
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(LIMITS)}")
    changed: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "trace": False, "trace_samples": True},
        "model": {"dtype": dtype},
        "data": {"eval": None},
        "train": {"max_steps": steps, "epochs": None, "eval_every": None},
        "checkpoint": {"every": None, "export": False},
        "telemetry": {"progress": "plain"},
    }
    sections = {name: getattr(config, name).model_copy(update=values, deep=True) for name, values in changed.items()}
    return Config.model_validate(config.model_copy(update=sections).model_dump())


def compare_run(config: Config, say: Say = lambda text: None) -> Outcome:
    """Train the reference over the rows of the run in `config.run.dir`, and compare every step.

    Args:
        config: of the run, as made by `check_config`.
        say: gets a line after each step.
    """
    steps = config.train.max_steps
    assert steps is not None, "the number of steps of a check is given"
    run = RecordedRun(config.run.dir)
    weights = weights_folder(config)
    reference = Reference(config, weights, steps)
    limits = limits_of(reference.model.config.model_type, config.model.dtype)
    done = [step for step in run.steps if step <= steps]
    rows = find_rows(config.data.train, {row_id for step in done for row_id in run.ids(step)})
    before: Mapping[str, torch.Tensor] = reference.snapshot()
    before_run: Mapping[str, torch.Tensor] = before
    checks: list[Check] = []
    for step in done:
        expected = reference.step(step, [rows[row_id] for row_id in run.ids(step)])
        given = run.read(step)
        trained = frozenset(reference.trained)
        found = compare_step(given, expected, reference.modules, trained, limits, before_run, before)
        checks += found
        if all(check.ok for check in found):
            reference.adopt(given.parameters)
        before, before_run = reference.snapshot(), given.parameters
        num_failed = sum(not check.ok for check in found)
        say(
            f"step {step}: {len(expected.ids)} rows, loss {expected.loss:.6f}, "
            + (f"{num_failed} of {len(found)} comparisons fail" if num_failed else f"{len(found)} comparisons agree")
        )
    return Outcome(
        judge(checks, steps, len(done), config.debug.faults),
        tuple(checks),
        len(done),
        len(rows),
        config.model.dtype,
        sum(parameter.numel() for parameter in reference.parameters.values()),
        str(weights),
        tuple(config.debug.faults),
    )


def weights_folder(config: Config) -> Path:
    """Where the run's whole-model weights are: what it wrote at its start, else the model folder."""
    made = config.run.dir / "init"
    return made if any(made.glob("*.safetensors")) else config.model.path
