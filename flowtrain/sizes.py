"""Sizes of rows in files: those that `flowtrain data scan` writes beside the rows, and traces of other data sets.

| line of `*.sizes.jsonl` (scan) | |
|---|---|
| `row`, `id` | number and id of the row |
| `skipped` | why the row cannot be used; then there are no sizes |
| `text_tokens`, `vision_tokens`, `trained_tokens`, `patches` | of the whole row |
| `images` | height, width, tokens and patches of each |

| column of `*.parquet` (trace) | |
|---|---|
| `n_text_tokens` | LLM tokens that are not vision tokens |
| `unit_tokens`, `image_tokens` | list: LLM tokens of each image or clip grid |
| `n_vision_tokens_hi`, `n_vision_tokens` | their sum, where no list is given; `_hi` is the high-resolution rule |
| `n_images` | how many images share that sum |
| `n_answer_tokens` | trained tokens, where given |
| `source` | what a row is of |

In a trace one LLM token of vision stands for `PATCHES_PER_TOKEN` encoder patches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flowtrain.errors import DataError
from flowtrain.types import ImageMeta, SampleMeta, SkippedRow

SIZES_SUFFIX = ".sizes.jsonl"
PATCHES_PER_TOKEN = 4

MOST_TOKENS = 1 << 31
"""Sizes above this are no sizes of rows."""

LISTED = ("unit_tokens", "image_tokens")
COUNTED = ("n_text_tokens", "n_vision_tokens_hi", "n_vision_tokens", "n_images", "n_answer_tokens")


def all_pairs(patches: int) -> int:
    """Of an image whose patches all attend to each other, in one layer."""
    return patches * patches


def sizes_file(data: Path) -> Path:
    """Where a scan of these rows writes their sizes."""
    return data.with_name(f"{data.name}{SIZES_SUFFIX}")


def row_sizes(row: SampleMeta | SkippedRow) -> dict[str, Any]:
    """One line of a scan."""
    if isinstance(row, SkippedRow):
        return {"row": row.row, "id": row.id, "skipped": row.reason}
    return {
        "row": row.row,
        "id": row.id,
        "text_tokens": row.text_tokens,
        "vision_tokens": row.vision_tokens,
        "trained_tokens": row.trained_tokens,
        "patches": row.patches,
        "images": [[image.height, image.width, image.tokens, image.patches] for image in row.images],
    }


def read_sizes(
    path: Path, about: int | None = None, pairs: Callable[[int], int] = all_pairs
) -> list[SampleMeta | SkippedRow]:
    """Rows of a scan, those that cannot be used among them, positions numbered from 0.

    `about`: of a longer file, about so many rows are read, evenly from all of it. `pairs`: of an image of so many
    patches (`EncoderShape.attended_pairs`); an encoder's geometry is not in the file.

    Raises:
        DataError: the file cannot be read, or a line is no row size.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): run `flowtrain data scan` again") from error
    rows: list[SampleMeta | SkippedRow] = []
    for number in range(0, len(lines), _stride(len(lines), about)):
        try:
            size = json.loads(lines[number])
            if "skipped" in size:
                rows.append(SkippedRow(len(rows), size["row"], size["id"], size["skipped"], ""))
                continue
            images = tuple(ImageMeta(h, w, tokens, patches, pairs(patches)) for h, w, tokens, patches in size["images"])
            counts = (size["text_tokens"], size["vision_tokens"], size["trained_tokens"])
            if not (_are_sizes(counts) and all(map(_are_sizes, size["images"])) and counts[0] + counts[1]):
                raise ValueError(f"sizes {size}")
            rows.append(SampleMeta.of(len(rows), size["row"], size["id"], *counts, images))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number + 1} is no row size: run `flowtrain data scan` again") from error
    return rows


def read_trace(
    path: Path,
    high_resolution: bool = False,
    trained_share: float = 1.0,
    about: int | None = None,
    pairs: Callable[[int], int] = all_pairs,
) -> tuple[list[SampleMeta], list[str]]:
    """Rows of a trace in the order of the file, and the source of each.

    `trained_share`: of the text tokens, where a row does not say how many are trained. `about`, `pairs`: as in
    `read_sizes`.

    Raises:
        DataError: the file is not a trace.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        told = " ".join(str(error).split())[:120]
        raise DataError(f"{path} cannot be read as parquet ({told}): give a trace of row sizes") from error
    if "n_text_tokens" not in table.column_names:
        raise DataError(f"{path} has no column `n_text_tokens`: give a trace of row sizes")
    stride = _stride(table.num_rows, about)
    columns = table.take(pa.array(range(0, table.num_rows, stride), pa.int64())).to_pydict()
    for name in sorted({*LISTED, *COUNTED} & columns.keys()):
        _check_sizes(path, name, columns[name], stride)
    images = _image_tokens(columns, high_resolution)

    @cache
    def image_of(tokens: int) -> ImageMeta:
        patches = PATCHES_PER_TOKEN * tokens
        return ImageMeta(0, 0, tokens, patches, pairs(patches))

    answers = columns.get("n_answer_tokens")
    rows = []
    for number, text in enumerate(columns["n_text_tokens"]):
        tokens = images[number]
        if not text and not sum(tokens):
            raise DataError(f"{path}: row {number * stride} has no token: leave it out of the trace")
        answer = answers[number] if answers is not None else None
        trained = round(text * trained_share) if answer is None else min(answer, text)
        metas = tuple(map(image_of, tokens))
        rows.append(SampleMeta.of(number, number, f"row-{number}", text, sum(tokens), trained, metas))
    sources = columns.get("source")
    return rows, [str(source) for source in sources] if sources is not None else [""] * len(rows)


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MOST_TOKENS for value in values)


def _check_sizes(path: Path, name: str, column: Sequence[Any], stride: int) -> None:
    """`DataError` where a value is no size, or no list of them in a column of lists."""
    listed = name in LISTED
    for number, value in enumerate(column):
        if value is None and name != "n_text_tokens":
            continue
        if isinstance(value, list) != listed or not _are_sizes(value if listed else (value,)):
            what = "lists of whole numbers" if listed else "whole numbers"
            raise DataError(
                f"{path}: row {number * stride} has {value!r} in column `{name}`: give {what} from 0 to {MOST_TOKENS}"
            )


def _image_tokens(columns: dict[str, list[Any]], high_resolution: bool) -> Sequence[Sequence[int]]:
    """LLM tokens of the images of each row."""
    high = high_resolution and "n_vision_tokens_hi" in columns
    units = next((columns[name] for name in LISTED if name in columns and not high), None)
    if units is not None:
        return [of_row or () for of_row in units]
    num = len(columns["n_text_tokens"])
    vision = columns.get("n_vision_tokens_hi" if high else "n_vision_tokens") or [0] * num
    counts = columns.get("n_images") or [1] * num
    return [_shares(total, count or 1) if total else () for total, count in zip(vision, counts, strict=True)]


def _shares(total: int, count: int) -> list[int]:
    """`total` in `count` whole parts as equal as can be."""
    return [total // count + (place < total % count) for place in range(min(count, total))]


def _stride(num: int, about: int | None) -> int:
    return max(1, num // about) if about is not None else 1
