"""A measurement of rows that are of no use ends with a sentence: rows come without end, and so would the search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowtrain.allocator import local_inventory, make_plan
from flowtrain.config.loading import load_config
from flowtrain.data.blocks import BlockRead
from flowtrain.data.sources import open_source
from flowtrain.errors import DataError
from flowtrain.packing import CostModel
from flowtrain.runtime.executor import Answer
from flowtrain.runtime.inputs import Inputs, composition
from flowtrain.runtime.local import LocalExecutor
from flowtrain.runtime.profile_bench import Bench
from flowtrain.runtime.signals import StopRequest
from flowtrain.shapes import read_shape
from flowtrain.types import Phase, Role, SampleMeta, SkippedRow

EXAMPLE = Path(__file__).parents[3] / "examples/emoji/emoji.yaml"
Row = SampleMeta | SkippedRow


class Reader(LocalExecutor):
    """Answers reads with rows of one kind."""

    def __init__(self, row: Callable[[int], Row]) -> None:
        super().__init__()
        self.row = row
        self.answers: list[Answer] = []

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Any = ()) -> None:
        phase, start, count, block = args
        rows = tuple(self.row(position) for position in range(start, start + count))
        self.answers.append(Answer(role, rank, method, BlockRead(phase, block, start, rows)))

    def next(self, timeout: float) -> Answer | None:
        return self.answers.pop(0)


def bench_of(row: Callable[[int], Row]) -> Bench:
    config = load_config(EXAMPLE, ["cluster.oversubscribe=true"]).config
    shape = read_shape(config.model.path)
    plan = make_plan(config, shape, local_inventory())
    inputs = Inputs(config, Path("unused"), shape, plan, open_source(config.data.train), None, None, None, None)
    cost = CostModel.from_shape(shape, config.frozen, config.cut)
    return Bench(inputs, Reader(row), composition(inputs), cost, 0, 0, StopRequest(1.0))


def long_row(position: int) -> SampleMeta:
    return SampleMeta.of(position, position, f"row-{position}", 500, 0, 100)


def bad_row(position: int) -> SkippedRow:
    return SkippedRow(position, position, f"row-{position}", "image-missing", "it is not there")


def test_rows_that_all_are_longer_than_the_pack_end_the_measurement() -> None:
    with pytest.raises(DataError, match=r"none of \d+ rows of .* fits a pack of 410 tokens, .*: raise packing"):
        bench_of(long_row).step_of(2, 410)


def test_rows_that_cannot_be_used_end_the_measurement() -> None:
    with pytest.raises(DataError, match=r"none of \d+ rows of .* can be used: run `flowtrain data check`"):
        bench_of(bad_row).step_of(2, 410)


def test_short_rows_among_them_make_a_step() -> None:
    step = bench_of(lambda position: bad_row(position) if position % 50 else long_row(position)).step_of(2, 600)
    assert len(step.packs) == 2
    assert step.phase is Phase.TRAIN
