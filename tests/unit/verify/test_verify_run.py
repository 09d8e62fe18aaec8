"""From the files of a run to the verdict; the files are written as a run writes them, from the reference's records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from flowtrain.config.schema import Config
from flowtrain.data.sources import RawRow
from flowtrain.errors import ConfigError
from flowtrain.telemetry.run_files import RunFiles
from flowtrain.types import Module
from flowtrain.verify.record import RecordedRun, StepRecord
from flowtrain.verify.reference import Reference
from flowtrain.verify.report import print_outcome
from flowtrain.verify.run import Outcome, check_config, compare_run

STEPS = 2


@pytest.fixture(scope="module")
def steps(make_config: Callable[..., Config], weights_dir: Path, rows: list[RawRow]) -> list[StepRecord]:
    """Two steps: pictures and text, then text only; modules by the reference's table."""
    reference = Reference(make_config(max_steps=STEPS), weights_dir, STEPS)
    return [reference.step(1, rows[:3]), reference.step(2, rows[4:])]


@pytest.fixture
def config(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    return make_config(run_dir=tmp_path, max_steps=STEPS)


def write_run(folder: Path, steps: list[StepRecord], two_ranks: bool = False) -> None:
    """metrics.jsonl, samples.jsonl and the tensors of each side."""
    with RunFiles(folder, None) as files:
        for step in steps:
            files.metrics.write(
                {
                    "step": step.step,
                    "rows": len(step.ids),
                    "tokens/trained": step.trained_tokens,
                    "loss_hex": float(step.loss).hex(),
                    "grad_norm": step.grad_norm,
                    **{f"grad_norm/{module.value}": step.norms.get(module) for module in Module},
                    **{f"lr/{module.value}": rate for module, rate in step.rates.items()},
                }
            )
            files.samples(step.step, 0, 0, step.ids[:1])
            files.samples(step.step, 1 if two_ranks else 0, 0 if two_ranks else 1, step.ids[1:])
            dump = folder / "verify" / f"step-{step.step}"
            dump.mkdir(parents=True)
            for kind, tensors in (("gradients", step.gradients), ("parameters", step.parameters)):
                vision = {name: tensor for name, tensor in tensors.items() if "visual" in name}
                save_file(vision, dump / f"producer-{kind}-0.safetensors")
                save_file(
                    {name: tensor for name, tensor in tensors.items() if name not in vision},
                    dump / f"consumer-{kind}-0.safetensors",
                )


@pytest.mark.parametrize("two_ranks", [False, True])
def test_equal_run_passes(config: Config, steps: list[StepRecord], two_ranks: bool) -> None:
    write_run(config.run.dir, steps, two_ranks)
    lines: list[str] = []
    outcome = compare_run(config, lines.append)
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert all(check.value == 0 for check in outcome.checks)
    assert outcome.steps == STEPS
    assert len(lines) == STEPS
    assert "comparisons agree" in lines[0]


def changed(
    steps: list[StepRecord], number: int, kind: str, part: str, change: Callable[[Any], Any]
) -> list[StepRecord]:
    """The records with the tensors of one step whose names hold `part` changed."""
    tensors = {
        name: change(tensor) if part in name else tensor for name, tensor in getattr(steps[number], kind).items()
    }
    return [*steps[:number], replace(steps[number], **{kind: tensors}), *steps[number + 1 :]]


@pytest.mark.parametrize(
    ("number", "kind", "part", "factor", "module"),
    [
        (0, "gradients", "visual.blocks", 2.0, Module.ENCODER),
        (0, "gradients", "merger", 1 + 1e-8, Module.PROJECTOR),
        (1, "gradients", "language_model", 0.5, Module.BACKBONE),
        (0, "parameters", "merger", 1 + 1e-4, Module.PROJECTOR),
        (1, "parameters", "visual.blocks", 1 - 1e-5, Module.ENCODER),
    ],
)
def test_fault_is_found_in_its_step_and_module(
    config: Config, steps: list[StepRecord], number: int, kind: str, part: str, factor: float, module: Module
) -> None:
    write_run(config.run.dir, changed(steps, number, kind, part, lambda tensor: tensor * factor))
    verdict = compare_run(config).verdict
    assert not verdict.ok
    assert (verdict.step, verdict.quantity, verdict.modules) == (number + 1, kind, (module,))


def test_run_that_stopped_early_fails(config: Config, steps: list[StepRecord]) -> None:
    write_run(config.run.dir, steps[:1])
    assert compare_run(config).verdict.sentence == "verify failed: the run trained 1 of 2 steps"


def test_row_trained_and_not_named_fails(config: Config, steps: list[StepRecord]) -> None:
    """The run's tensors hold a row that samples.jsonl leaves out."""
    write_run(config.run.dir, [replace(steps[0], ids=steps[0].ids[:2]), steps[1]])
    verdict = compare_run(config).verdict
    assert (verdict.ok, verdict.step, verdict.quantity) == (False, 1, "tokens")


def test_tensor_on_both_sides_is_seen(config: Config, steps: list[StepRecord]) -> None:
    write_run(config.run.dir, steps)
    save_file(dict(steps[0].parameters), config.run.dir / "verify/step-1/producer-parameters-0.safetensors")
    assert RecordedRun(config.run.dir).read(1).repeated
    verdict = compare_run(config).verdict
    assert verdict.modules == (Module.BACKBONE,)
    assert "both sides of the run hold" in verdict.sentence


def test_weights_made_by_the_run_come_first(config: Config, steps: list[StepRecord], weights_dir: Path) -> None:
    """A run that started from other weights than the model folder's has written them."""
    write_run(config.run.dir, steps)
    (config.run.dir / "init").mkdir()
    other = {name: torch.randn_like(tensor) for name, tensor in steps[0].parameters.items()}
    save_file(other, config.run.dir / "init/model.safetensors")
    outcome = compare_run(config)
    assert outcome.weights == str(config.run.dir / "init")
    assert not outcome.verdict.ok


def test_outcome_as_json_and_table(config: Config, steps: list[StepRecord]) -> None:
    write_run(config.run.dir, changed(steps, 0, "gradients", "merger", lambda tensor: tensor * 3))
    outcome: Outcome = compare_run(config)
    stored = json.loads(json.dumps(outcome.to_json()))
    assert stored["ok"] is False
    assert stored["modules"] == ["projector"]
    assert 1 < stored["largest"]["gradients/projector"] < 2
    failed = [check["name"] for check in stored["checks"] if not check["ok"]]
    assert failed == ["gradients/projector"]
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    print_outcome(outcome, console)
    text = console.export_text()
    console.file.close()
    assert "gradients/projector" in text
    assert "FAIL" in text
    assert "all 3 × the reference" in text


def test_config_of_the_check_keeps_the_arithmetic(emoji: Path, tmp_path: Path) -> None:
    given = Config.model_validate(
        {
            "model": {"path": emoji / "model"},
            "data": {"train": emoji / "data/train.jsonl", "eval": emoji / "data/test.jsonl"},
            "train": {"epochs": 3, "eval_every": 2, "freeze": ["encoder"]},
            "checkpoint": {"every": 1},
            "debug": {"delays": {"producer_unit_ms": {0: 100}}, "faults": ["encoder_gradient_doubled"]},
        }
    )
    config = check_config(given, 5, "float64", tmp_path)
    assert (config.train.max_steps, config.train.epochs, config.train.eval_every) == (5, None, None)
    assert (config.model.dtype, config.run.dir, config.data.eval) == ("float64", tmp_path, None)
    assert (config.checkpoint.every, config.checkpoint.export) == (None, False)
    assert config.train.freeze == ("encoder",)
    assert config.debug == given.debug
    with pytest.raises(ConfigError, match="--dtype float16"):
        check_config(given, 5, "float16", tmp_path)
