"""Rows for the plain Hugging Face paths: found by id, with pictures opened the way transformers opens them.

`reference` and `evaluate` read rows through here. Of the runtime only `flowtrain.data.sources` is used, which gives a
row's messages and the bytes of its images; everything after that is transformers' own.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from transformers.image_utils import load_image

from flowtrain.data.sources import RawRow, open_source
from flowtrain.errors import DataError


def find_rows(path: Path, ids: Iterable[str]) -> dict[str, RawRow]:
    """The rows with these ids; reads the source from its start until all are found and known to be the only ones.

    Raises:
        DataError: an id that no row has, or that two different rows share.
    """
    wanted = set(ids)
    found: dict[str, RawRow] = {}
    source = open_source(path)
    for index in range(len(source)):
        try:
            row = source.row(index)
        except DataError:
            continue  # the run does not train it either
        if row.id not in wanted:
            continue
        if row.id in found and not _same(found[row.id], row):
            raise DataError(
                f"{path}: rows {found[row.id].index} and {index} share the id {row.id!r}; "
                "give every row an id of its own, so that a run's rows can be found again"
            )
        found.setdefault(row.id, row)
    missing = wanted - found.keys()
    if missing:
        raise DataError(f"{path}: no row has the id {min(missing)!r} that the run trained; has the file changed?")
    return found


def _same(row: RawRow, other: RawRow) -> bool:
    return row.messages == other.messages and [i.value for i in row.images] == [i.value for i in other.images]


def pictures(row: RawRow, num: int | None = None) -> list[Image.Image]:
    """The row's first `num` images (default: all), upright and RGB as `transformers.image_utils.load_image` makes them.

    Raises:
        DataError: an image that is missing or cannot be decoded.
    """
    opened = []
    for ref in row.images[:num]:
        stored = ref.read()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                opened.append(load_image(Image.open(io.BytesIO(stored))))
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise DataError(f"row {row.id!r}: {ref.label} cannot be decoded: {error}") from error
    return opened


def num_images(messages: Iterable[dict[str, Any]]) -> int:
    """Image places in these messages."""
    return sum(
        part.get("type") == "image"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def text_of(message: dict[str, Any]) -> str:
    """The text of one message, its parts joined."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")
