"""Rows of a trace become steps: what benchmarks, `flowtrain packing` and the simulator do with its sizes (pure)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from flowtrain.packing.compose import Composer
from flowtrain.packing.cost import CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta, SkippedRow, Step

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


def composed_steps(spec: CompositionSpec, cost: CostModel, rows: Iterable[SampleMeta | SkippedRow]) -> Iterator[Step]:
    """The steps of these rows; rows that no pack can hold are left out."""
    composer, waiting = Composer(spec, cost), iter(rows)
    while True:
        while (wanted := composer.wants()) > 0:
            drawn = list(islice(waiting, wanted))
            composer.add(drawn)
            if not drawn:
                composer.end()
        step = composer.next()
        if step is None:
            return
        yield step
