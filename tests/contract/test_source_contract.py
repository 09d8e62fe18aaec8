"""Every kind of source gives the same rows, errors and promises for the same data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowtrain.data.errors import BadRow
from flowtrain.data.sources import Source, open_source

PIXELS = b"not decoded here"
GOOD = [0, 1, 3]
BAD = 2


def stored_rows() -> list[dict[str, Any]]:
    def row(row_id: str | None, prompt: str, images: list[str]) -> dict[str, Any]:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "né 猫 🙂\n"}]
        return {"id": row_id, "messages": turns, "images": images, "system": None}

    return [
        row("first", "<image> or <image>?", ["a.png", "b.png"]),
        row(None, "no picture", []),
        row("bad", "<image>", []),
        row("last", "<image>", ["folder/c.png"]),
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_array(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def one_file(write: Callable[..., Path]) -> Callable[[Path], Path]:
    return lambda folder: write(folder / "rows", stored_rows())


def two_files(write: Callable[..., Path]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        rows = stored_rows()
        write(folder / "part-2", rows[1:])
        write(folder / "part-1", rows[:1])
        return folder

    return make


@pytest.fixture(
    params=[made(write) for made in (one_file, two_files) for write in (write_jsonl, write_array, write_parquet)],
    ids=["jsonl", "array", "parquet", "jsonl-folder", "array-folder", "parquet-folder"],
)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    (tmp_path / "folder").mkdir()
    for name in ("a.png", "b.png", "folder/c.png"):
        (tmp_path / name).write_bytes(PIXELS + name.encode())
    return open_source(request.param(tmp_path))


def test_rows_in_order(source: Source) -> None:
    assert len(source) == 4
    rows = [source.row(index) for index in GOOD]
    assert [row.index for row in rows] == GOOD
    assert [row.id for row in rows] == ["first", "row-1", "last"]
    assert all(message["role"] in ("user", "assistant") for row in rows for message in row.messages)
    assert all(row.messages[-1]["content"] == [{"type": "text", "text": "né 猫 🙂\n"}] for row in rows)


def test_as_many_images_as_places_in_their_order(source: Source) -> None:
    row = source.row(0)
    assert [part["type"] for part in row.messages[0]["content"]] == ["image", "text", "image", "text"]
    assert [image.read() for image in row.images] == [PIXELS + b"a.png", PIXELS + b"b.png"]
    assert source.row(3).images[0].read() == PIXELS + b"folder/c.png"
    assert source.row(1).images == ()


def test_rows_may_be_read_in_any_order_and_again(source: Source) -> None:
    first = {index: source.row(index) for index in GOOD}
    assert {index: source.row(index) for index in reversed(GOOD)} == first


def test_a_bad_row_has_reason_id_and_place_and_breaks_no_other(source: Source) -> None:
    with pytest.raises(BadRow) as caught:
        source.row(BAD)
    assert (caught.value.reason, caught.value.row_id) == ("image-count", "bad")
    assert str(source.path.parent) in caught.value.detail
    assert source.row(3).id == "last"


@pytest.mark.parametrize("index", [4, -1])
def test_a_row_that_is_not_there(source: Source, index: int) -> None:
    with pytest.raises(IndexError):
        source.row(index)


def test_opened_again_it_is_the_same(source: Source) -> None:
    again = open_source(source.path)
    assert again.fingerprint == source.fingerprint
    assert again.row(0) == source.row(0)
