"""Rows of a plan: as long as a run lets them be, also where their sizes are assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from allocator_inputs import config

from flowtrain.allocator import Inventory, make_plan
from flowtrain.allocator.hardware import HARDWARE, NodePool
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.stats import assumed_stats
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

EIGHT_CORES = Inventory(cpus=8, gpus=0, memory_bytes=2**35, shm_bytes=2**30)


def test_rows_are_assumed_as_long_as_a_row_may_be(emoji: Path, shape: ModelShape) -> None:
    """Below `packing.max_tokens` too: none is left out, the images are there, a step has packs for several ranks."""
    step = {"step": {"samples": 2048}, "max_steps": 1}
    given = config(emoji, data={"train": emoji / "data/train.jsonl", "max_seq_len": 24}, train=step)
    assumed = assumed_stats(24)
    problem = question_of(given, shape, None, (NodePool(HARDWARE["cpu"], 1),)).problem()
    assert [load.role for load in problem.loads] == [Role.PRODUCER, Role.CONSUMER]
    assert problem.loads[-1].tokens == pytest.approx(float(assumed.within(24).lengths.mean()))
    plan = make_plan(given, shape, EIGHT_CORES)
    assert len(plan.producers.ranks) + len(plan.consumers.ranks) > 2


def test_a_step_in_packs_has_a_pack_for_each_row_with_its_own(emoji: Path, shape: ModelShape) -> None:
    packing = {"max_tokens": 512, "on_long_row": "own_pack"}
    data = {"train": emoji / "data/train.jsonl", "max_seq_len": 8192}
    given = config(emoji, packing=packing, data=data, train={"step": {"packs": 4}, "max_steps": 1})
    stats, cluster = assumed_stats(), (NodePool(HARDWARE["cpu"], 1),)
    rows = question_of(given, shape, stats, cluster).step_samples
    assert rows is not None
    packs = 4 * cluster[0].devices
    alone = float((stats.lengths > 512).mean())
    assert rows * alone <= packs < rows * alone * 1.5
