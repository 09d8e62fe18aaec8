"""The order in which rows of a trace are composed: what benchmarks and `flowtrain packing` do with its sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from flowtrain.types import SampleMeta

BLOCK_ROWS = 2000
"""Rows of one source in a row, in blocked order."""

Order = Literal["random", "blocked", "file"]


def in_order(rows: Sequence[SampleMeta], sources: Sequence[str], order: Order, seed: int) -> list[SampleMeta]:
    """Rows in a seeded order, positions numbered anew. `blocked`: long stretches of one source."""
    numbers = list(range(len(rows)))
    chance = random.Random(seed)
    if order != "file":
        chance.shuffle(numbers)
    if order == "blocked":
        numbers.sort(key=lambda number: sources[number])
        blocks = [numbers[start : start + BLOCK_ROWS] for start in range(0, len(numbers), BLOCK_ROWS)]
        chance.shuffle(blocks)
        numbers = [number for block in blocks for number in block]
    return [rows[number]._replace(position=position) for position, number in enumerate(numbers)]
