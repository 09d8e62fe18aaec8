"""The reader side of a run: rows of a range of positions, read, tokenised and measured.

    read(phase, start, count, block) ──▶ Order ──▶ rows ──▶ SampleBuilder ──▶ (BlockRead, PayloadBlock)

A plain class, so that the same code runs in this process and inside an actor. Source and processor of a phase are
opened when its first block is asked for. Training rows are shuffled (`data.shuffle`), held-out rows are not. What a
read returns depends on its arguments and the files alone, so it does not matter which reader gets which block, or when.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowtrain.config.schema import Config
from flowtrain.data.blocks import BlockRead, PayloadBlock, SampleTokens, payload_number
from flowtrain.data.measure import Measure, open_measure
from flowtrain.data.order import Order
from flowtrain.data.sample import SampleBuilder, check_expansion
from flowtrain.data.show import first_sample_text
from flowtrain.data.sources import open_source
from flowtrain.errors import DataError
from flowtrain.types import Phase, SampleMeta, SkippedRow

__all__ = ["BlockRead", "PayloadBlock", "ReaderStage", "SampleTokens"]


class ReaderStage:
    """Reads blocks of both phases."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._measure: Measure | None = None
        self._rows: dict[Phase, tuple[Order, SampleBuilder]] = {}

    def read(self, phase: Phase, start: int, count: int, block: int) -> tuple[BlockRead, PayloadBlock]:
        """Rows at positions [start, start + count). `block` counts the requests of one phase."""
        order, builder = self._open(phase)
        number = payload_number(phase, block)
        rows: list[SampleMeta | SkippedRow] = []
        tokens: list[SampleTokens] = []
        for position in range(start, start + count):
            built = builder.build(position, order.row(position), number, len(tokens))
            if isinstance(built, SkippedRow):
                rows.append(built)
            else:
                rows.append(built[0])
                tokens.append(built[1])
        return BlockRead(phase, number, start, tuple(rows)), PayloadBlock.of(tokens)

    def first_sample(self) -> str | None:
        """The run's first usable training sample as text with its label mask, for the start of a run."""
        order, builder = self._open(Phase.TRAIN)
        return first_sample_text(builder, order)

    def close(self) -> None:
        self._rows.clear()

    def _open(self, phase: Phase) -> tuple[Order, SampleBuilder]:
        if phase not in self._rows:
            path = self._path(phase)
            source = open_source(path)
            if not len(source):
                raise DataError(f"{path} has no rows: give a file that has some")
            order = Order.of(self.config, len(source))
            if phase is Phase.EVAL:
                order = replace(order, shuffle=False)
            builder = SampleBuilder(
                self._open_measure(),
                source,
                self.config.data,
                self.config.max_row_tokens,
                "error" if self.config.packing.on_long_row == "error" else "skip",
            )
            self._rows[phase] = order, builder
        return self._rows[phase]

    def _path(self, phase: Phase) -> Path:
        path = self.config.data.train if phase is Phase.TRAIN else self.config.data.eval
        assert path is not None, "held-out rows were asked for and data.eval is not set"
        return path

    def _open_measure(self) -> Measure:
        if self._measure is None:
            self._measure = open_measure(self.config)
            check_expansion(self._measure)
        return self._measure
