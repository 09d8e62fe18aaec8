"""Sizes of real data sets, one row a sample, as rows of composition: what benchmarks and `flowtrain packing` read.

| column | meaning |
|---|---|
| `n_text_tokens` | LLM tokens that are not vision tokens |
| `unit_tokens`, `image_tokens` | list: LLM tokens of each image or clip grid |
| `n_vision_tokens_hi`, `n_vision_tokens` | their sum, where no list is given; `_hi` is the high-resolution rule |
| `n_images` | how many images share that sum |
| `n_answer_tokens` | trained tokens, where given; else all text |
| `source` | what a row is of; for blocked order |

One LLM token of vision stands for `PATCHES_PER_TOKEN` encoder patches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flowtrain.errors import DataError
from flowtrain.types import ImageMeta, SampleMeta

PATCHES_PER_TOKEN = 4
BLOCK_ROWS = 2000
"""Rows of one source in a row, in blocked order."""

Order = Literal["random", "blocked", "file"]


def read_trace(path: Path, high_resolution: bool = False) -> tuple[list[SampleMeta], list[str]]:
    """Rows in the order of the file, and the source of each; DataError when the file is not a trace."""
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({error}): give a trace file or a config") from error
    if "n_text_tokens" not in table.column_names:
        raise DataError(f"{path} has no column `n_text_tokens`: give a trace of row sizes, or a config")
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in table.column_names}
    units = next((columns[name] for name in ("unit_tokens", "image_tokens") if name in columns), None)
    wanted = ("n_vision_tokens_hi", "n_vision_tokens") if high_resolution else ("n_vision_tokens",)
    vision = next((columns[name] for name in wanted if name in columns), None)
    if high_resolution and "n_vision_tokens_hi" in columns:
        units = None
    answers, counts, sources = columns.get("n_answer_tokens"), columns.get("n_images"), columns.get("source")
    rows = []
    for number, text in enumerate(columns["n_text_tokens"]):
        if units is not None:
            parts = units[number] or []
        elif vision is not None and vision[number]:
            parts = _shares(vision[number], (counts[number] if counts is not None else 1) or 1)
        else:
            parts = []
        images = tuple([ImageMeta(0, 0, tokens, PATCHES_PER_TOKEN * tokens) for tokens in parts])
        trained = min(answers[number], text) if answers is not None else text
        rows.append(SampleMeta(number, number, f"row-{number}", text, sum(parts), trained, images))
    return rows, [str(source) for source in sources] if sources is not None else [""] * len(rows)


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
    return [replace(rows[number], position=position) for position, number in enumerate(numbers)]


def _shares(total: int, count: int) -> list[int]:
    """`total` in `count` whole parts as equal as can be."""
    return [total // count + (place < total % count) for place in range(min(count, total))]
