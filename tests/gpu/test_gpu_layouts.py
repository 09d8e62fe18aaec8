"""What tests on a CPU show, once more on devices: the same lines with CUDA tensors, NCCL and torch's own kernels.

| lines | on a CPU | on a device |
|---|---|---|
| halves, packs, updates of a whole run | `test_exact.py::test_other_ways_equal_plain[colocated]` | here |
| NCCL groups of each axis, FSDP, tensor, context, pipeline and expert parallelism | `test_parallel_tensor.py` | here |
| variable-length attention | `test_models_attention.py::test_equals_one_masked_square` (segments) | the same file |
| page-locked pool | `test_pool_pin.py`, `test_pool_client.py` | the same file |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gloo_ranks import Ranks
from integration_runs import make_config
from parallel_cells import make_case, run_layout
from tiny_families import make_family

from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.verify.run import check_config, compare_run

LIMIT = 1e-9
NUM_DEVICES = torch.cuda.device_count()

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


@pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a GPU")
@pytest.mark.timeout(300)
def test_a_run_on_one_device_equals_plain(tmp_path: Path) -> None:
    overrides = (
        "mode=monolithic",
        "consumers.device=cuda",
        "producers.device=cuda",
        "train.step={samples: 8}",
        "train.max_steps=2",
        "train.epochs=null",
        "data.eval=null",
        "model.dtype=float64",
    )
    config = make_config("emoji", tmp_path, *overrides)
    execute(config, tmp_path, None, StopRequest(60), dump=True)
    outcome = compare_run(check_config(config, 2, "float64", tmp_path))
    assert outcome.verdict.ok, outcome.verdict.sentence


@pytest.mark.skipif(NUM_DEVICES < 4, reason=f"needs 4 GPUs, there are {NUM_DEVICES}")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_vl", "f2t2"), ("qwen3_vl", "f2c2"), ("qwen3_vl", "t2p2"), ("qwen3_vl_moe", "r2f2e2")],
)
def test_a_backbone_over_devices_equals_itself_whole(family: str, layout: str, ranks: Ranks, tmp_path: Path) -> None:
    case = make_case(make_family(family, tmp_path / "model"), tmp_path)
    for errors in ranks.call(run_layout, case, layout, (), "cuda", world_size=4):
        assert {name: error for name, error in errors.items() if not error <= LIMIT} == {}
