"""Modules cut over several ranks compute what a plain single-process loop computes (contract C2).

A few cells of the table; `scripts/verify-all` runs all of it. Two steps of eight rows, most of them without an image.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integration_runs import make_config
from layout_cells import FROZEN, PROJECTOR, Cell, verify_cell
from safetensors.torch import load_file

from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest

CELLS = (
    Cell("qwen3_vl", "f2", "r2f2"),
    Cell("qwen3_vl", "r1", "f2", ("backbone",)),
    Cell("qwen3_vl", "f2", "f2", FROZEN),
    Cell("llava_onevision", "f2", "f2", PROJECTOR),
    Cell("llava_next", "f2", "r1"),
    Cell("qwen3_vl", "r2", "t2"),
    Cell("qwen3_vl", "t2", "r2"),
    Cell("qwen3_vl", "r1", "c2"),
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
    """Two steps in one layout and a third in others: loss and export are those of three steps in one process each."""
    losses, exports = {}, {}
    begun = None
    for number, (producers, consumers) in enumerate((("f2", "f2t2"), ("r1", "p2"), ("r2", "r1"))):
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        config = make_config("emoji", run_dir, *_short(producers, consumers, steps=3 if begun else 2))
        execute(config, run_dir, begun, StopRequest(60), executor=actors)
        begun = begun or run_dir / "checkpoints" / "step-2"
        losses[consumers], exports[consumers] = _losses(run_dir), _export(run_dir)
    plain = tmp_path / "plain"
    plain.mkdir()
    execute(make_config("emoji", plain, *_short("r1", "r1", steps=3)), plain, None, StopRequest(60), executor=actors)
    for consumers in ("p2", "r1"):
        assert losses[consumers][-1] == pytest.approx(_losses(plain)[-1], rel=1e-10)
        assert exports[consumers].keys() == _export(plain).keys()
        for name, tensor in _export(plain).items():
            assert torch.allclose(exports[consumers][name], tensor, rtol=0, atol=1e-7), name


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


def _losses(run_dir: Path) -> list[float]:
    from flowtrain.verify.record import read_lines

    return [float.fromhex(record["loss_hex"]) for record in read_lines(run_dir / "metrics.jsonl")]
