"""Modules cut over several ranks compute what a plain single-process loop computes (contract C2).

A few cells of the table; `scripts/verify-all` runs all of it. Two steps of eight rows, most of them without an image.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration_runs import EXAMPLES, lines, make_config
from layout_cells import FROZEN, PROJECTOR, Cell, mixed_rows, verify_cell
from safetensors.torch import load_file
from tiny_families import make_family

from flowtrain.allocator.planfile import obey, read_plan_file
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.shapes import read_shape
from flowtrain.telemetry.metrics import LOAD_OF

EVALUATED = "validation_metrics/loss"

CELLS = (
    Cell("qwen3_vl", "f2", "r2f2"),
    Cell("qwen3_vl", "r1", "f2", ("backbone",)),
    Cell("qwen3_vl", "f2", "f2", FROZEN),
    Cell("llava_onevision", "f2", "f2", PROJECTOR),
    Cell("llava_next", "f2", "r1"),
    Cell("qwen3_vl", "r2", "t4"),
    Cell("qwen3_vl", "t2", "r2"),
    Cell("qwen3_vl", "r1", "f2c2"),
    Cell("qwen3_vl", "f2", "f2t2", PROJECTOR),
    Cell("qwen3_vl", "r2", "p2"),
    Cell("qwen3_vl_4_layers", "r1", "t2p2v2", PROJECTOR),
    Cell("qwen3_vl_moe", "r1", "f2e2"),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_layout_equals_plain(actors: RayExecutor, tmp_path: Path, cell: Cell) -> None:
    outcome = verify_cell(actors, cell, tmp_path, steps=2)
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.steps == 2


def test_a_checkpoint_goes_on_in_another_layout(actors: RayExecutor, tmp_path: Path) -> None:
    """Two steps in one layout and a third in others: losses and export are those of three steps in one process each."""
    begun = _run(actors, tmp_path, _short("f2", "f2t2", steps=2)) / "checkpoints" / "step-2"
    plain = _run(actors, tmp_path, _short("r1", "r1", steps=3))
    for producers, consumers in (("r1", "p2"), ("r2", "r1"), ("r1", "r2f2")):
        went_on = _run(actors, tmp_path, _short(producers, consumers, steps=3), begun)
        print(f"f2 x f2t2, then {producers} x {consumers}: loss off by {assert_same_result(went_on, plain)}")


def test_a_checkpoint_goes_on_with_the_projector_on_the_other_side(actors: RayExecutor, tmp_path: Path) -> None:
    """It lies beside the encoder while that trains, else beside the backbone. Losses of a fourth step, after an update
    with moments that were read, are those of one process each."""
    begun = _run(actors, tmp_path, _short("f2", "f2t2", steps=2)) / "checkpoints" / "step-2"
    frozen = "train.freeze=[encoder]"
    plain = _run(actors, tmp_path, (*_short("r1", "r1", steps=4), frozen), begun)
    for consumers in ("p2", "r2f2"):
        went_on = _run(actors, tmp_path, (*_short("r1", consumers, steps=4), frozen), begun)
        print(f"f2 x f2t2, then r1 x {consumers}: loss off by {assert_same_result(went_on, plain)}")


def test_losses_of_held_out_rows_and_export_are_those_of_one_process(actors: RayExecutor, tmp_path: Path) -> None:
    """Heads, tokens, layers and experts over ranks, of a model with experts; a row is held out from each three."""
    model = make_family("qwen3_vl_moe", tmp_path / "model")
    rows = mixed_rows(tmp_path).read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(rows[::6]), encoding="utf-8")
    overrides = (f"model.path={model}", f"data.eval={held_out}")
    plain = _run(actors, tmp_path, (*_short("r1", "r1", steps=1), *overrides))
    for consumers in ("t2c2", "p2", "f2e2"):
        assert_same_result(_run(actors, tmp_path, (*_short("r1", consumers, steps=1), *overrides)), plain)


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl", "p2"), ("qwen3_vl_moe", "f2e2")])
def test_a_plan_of_the_allocator_runs(actors: RayExecutor, tmp_path: Path, family: str, layout: str) -> None:
    """The backbone's layout is asked for, and the allocator finds the encoder's for four cores."""
    overrides = ("producers.num=null", f"model.path={make_family(family, tmp_path / 'model')}", "train.max_steps=1")
    short = [value for value in _short("r1", layout, steps=1) if not value.startswith("producers.")]
    command = [sys.executable, "-m", "flowtrain.cli.main", "plan", str(EXAMPLES / "emoji" / "emoji.yaml")]
    command += ["--device", "cpu", "--nodes", "1", "--devices-per-node", "4", "--out", str(tmp_path / "plan.yaml")]
    for override in (*short, *overrides):
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert done.returncode == 0, done.stderr
    run_dir = _folder(tmp_path)
    config = make_config("emoji", run_dir, *short, *overrides)
    config = obey(config, read_plan_file(tmp_path / "plan.yaml"), read_shape(config.model.path))
    assert (config.producers.layout, config.consumers.layout) == ("r2", layout)
    execute(config, run_dir, None, StopRequest(60), executor=actors)
    assert_same_result(run_dir, _run(actors, tmp_path, (*_short("r1", "r1", steps=1), *overrides[1:])))


@pytest.mark.parametrize("slow", ["producer", "consumer"])
def test_a_pipeline_starves_as_long_as_its_features_are_late(actors: RayExecutor, tmp_path: Path, slow: str) -> None:
    """What a stage waits for another one is no starvation: only what the first waits for features is."""
    delay = "debug.delays.producer_unit_ms={0: 300}" if slow == "producer" else "debug.delays.consumer_pack_ms={0: 300}"
    frozen = ("train.freeze=[encoder]", "packing.max_tokens=256", "checkpoint.export=false")
    run_dir = _run(actors, tmp_path, (*_short("r1", "p2", steps=2), "train.step={packs: 6}", *frozen, delay))
    last = lines(run_dir / "metrics.jsonl")[-1]
    seconds, starved = last["time_metrics/end_to_end(s)"], last["flow/starvation(s)"]
    if slow == "producer":
        assert 0.5 * seconds < starved < seconds
    else:
        assert seconds > 6 * 0.3
        assert starved < 0.25 * seconds


def assert_same_result(run_dir: Path, plain: Path) -> str:
    """The last step's loss, that of held-out rows and the weights for the user; returns how far the loss is off."""
    record, expected = (lines(folder / "metrics.jsonl")[-1] for folder in (run_dir, plain))
    loss, wanted_loss = (float.fromhex(of["loss_hex"]) for of in (record, expected))
    assert loss == pytest.approx(wanted_loss, rel=1e-10)
    assert not [name for name in record.keys() ^ expected.keys() if LOAD_OF.part(name) is None]
    if EVALUATED in expected:
        assert record[EVALUATED] == pytest.approx(expected[EVALUATED], rel=1e-10)
    exported, wanted = _export(run_dir), _export(plain)
    assert exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=1e-7), name
    return f"{abs(loss / wanted_loss - 1):.1e}"


def _folder(folder: Path) -> Path:
    run_dir = folder / f"run-{len(list(folder.glob('run-*')))}"
    run_dir.mkdir()
    return run_dir


def _run(actors: RayExecutor, folder: Path, overrides: tuple[str, ...], begun: Path | None = None) -> Path:
    run_dir = _folder(folder)
    execute(make_config("emoji", run_dir, *overrides), run_dir, begun, StopRequest(60), executor=actors)
    return run_dir


def _short(producers: str, consumers: str, steps: int) -> tuple[str, ...]:
    return (
        f"producers.layout={producers}",
        f"consumers.layout={consumers}",
        "train.step={samples: 8}",
        f"train.max_steps={steps}",
        "train.epochs=null",
        "train.schedule=constant",
        "packing.lookahead=1",
        "data.eval=null",
        "model.dtype=float64",
        "checkpoint.export=true",
    )


def _export(run_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted((run_dir / "export").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
