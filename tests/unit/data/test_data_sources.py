"""Sources: every shape of file and row that users have on disk, and one plain sentence for what cannot be read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import conversation, png

from flowtrain.config.schema import Config
from flowtrain.data.errors import BadRow
from flowtrain.data.sources import open_source
from flowtrain.data.sources.table import GroupCache, ParquetSource
from flowtrain.errors import DataError

Write = Callable[..., Path]
TEXT = {"type": "text", "text": "What is it?"}


def user_content(path: Path, row: int = 0) -> list[dict[str, Any]]:
    return list(open_source(path).row(row).messages[0]["content"])


def reason_of(path: Path, row: int = 0) -> BadRow:
    with pytest.raises(BadRow) as caught:
        open_source(path).row(row)
    return caught.value


# --- shapes of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        conversation(),
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, TEXT]},
                {"role": "assistant", "content": "A cat."},
            ],
            "images": "a.png",
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "a.png"}, TEXT]},
                {"role": "assistant", "content": "A cat."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, TEXT]},
                {"role": "assistant", "content": "A cat."},
            ]
        },
        {
            "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
            "image": "a.png",
        },
        conversation(images=[{"bytes": None, "path": "a.png"}]),
        conversation(images=["data:image/png;base64," + base64.b64encode(png()).decode()]),
    ],
)
def test_known_shapes_give_the_same_row(write_rows: Write, row: dict[str, Any]) -> None:
    path = write_rows(row)
    read = open_source(path).row(0)
    assert read.id == "row-0"
    assert read.messages == (
        {"role": "user", "content": [{"type": "image"}, TEXT]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    )
    assert [image.read() for image in read.images] == [png()]


def test_every_form_of_path(write_rows: Write, tmp_path: Path) -> None:
    absolute = str(tmp_path / "a.png")
    path = write_rows(*(conversation(images=[value]) for value in ("./a.png", absolute, f"file://{absolute}")))
    source = open_source(path)
    assert {source.row(row).images[0].read() for row in range(3)} == {png()}


def test_a_system_column_is_a_first_message_and_null_is_none(write_rows: Write) -> None:
    path = write_rows({**conversation(), "system": "Be brief."}, {**conversation(), "system": None})
    source = open_source(path)
    assert [message["role"] for message in source.row(0).messages] == ["system", "user", "assistant"]
    assert [message["role"] for message in source.row(1).messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "reason", "told"),
    [
        ({"text": "x"}, "bad-messages", "neither `messages` nor `conversations`"),
        ({"messages": []}, "bad-messages", "an empty list"),
        ({"messages": "hi"}, "bad-messages", "is text"),
        ("7", "bad-messages", "is a number"),
        (conversation(answer=7), "bad-messages", "is a number"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "bad-messages", "the role 'narrator'"),
        ({"messages": ["x"]}, "bad-messages", "is text, not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "bad-messages", "type 'video'"),
        ('{"messages": [], "messages": []}', "bad-messages", "the key 'messages' twice"),
        ('{"messages": [}', "bad-messages", "rows.jsonl:1:15 is not JSON"),
        (conversation(answer="\ud800"), "bad-messages", "lone surrogate"),
        (conversation(images=[]), "image-count", "0 images and 1 places"),
        (conversation(images=["a.png", "a.png"]), "image-count", "2 images and 1 places"),
        (conversation(prompt="no place"), "image-count", "1 images and 0 places"),
        (conversation(images=["https://example.org/a.png?key=1"]), "image-missing", "has a query or fragment"),
        (conversation(images=[None]), "image-missing", "is missing"),
    ],
)
def test_other_shapes_are_named(write_rows: Write, row: Any, reason: str, told: str) -> None:
    error = reason_of(write_rows(row))
    assert error.reason == reason
    assert told in error.detail
    assert "rows.jsonl:1" in error.detail
    assert error.exit_code == 3


def test_bad_rows_keep_their_id(write_rows: Write) -> None:
    assert reason_of(write_rows({"id": "cat-7", **conversation(images=[])})).row_id == "cat-7"
    assert open_source(write_rows({"id": 7, **conversation()})).row(0).id == "7"


def test_a_missing_file_is_told_when_it_is_read(write_rows: Write) -> None:
    image = open_source(write_rows(conversation(images=["gone.png"]))).row(0).images[0]
    with pytest.raises(BadRow, match=r"gone\.png.*No such file") as caught:
        image.read()
    assert caught.value.reason == "image-missing"


# --- files ------------------------------------------------------------------------------------------------------------


def test_broken_lines_do_not_break_the_file(tmp_path: Path) -> None:
    good = json.dumps(conversation(images=[], prompt="hi")).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n\xff\xfe{}\r\n" + good + b"\r\n  \n" + good)
    source = open_source(path)
    assert len(source) == 4
    assert [source.row(row).where for row in (0, 2, 3)] == [f"{path}:{line}" for line in (1, 4, 6)]
    assert "not UTF-8" in reason_of(path, 1).detail


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_whatever_the_file_is_called(tmp_path: Path, name: str, indent: int | None) -> None:
    rows = [{"id": f"é🙂{n}", **conversation(images=[], prompt=f"né {n}")} for n in range(5)]
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(rows, indent=indent, ensure_ascii=False).encode())
    source = open_source(path)
    assert [source.row(row).id for row in range(len(source))] == [row["id"] for row in rows]
    lines = path.read_text("utf-8-sig").split("\n")
    if indent:
        where = int(source.row(3).where.rpartition(":")[2])
        assert rows[3]["id"] in "".join(lines[where - 1 : where + 1])


def test_a_broken_array_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"messages": []},\n {"messages": ]')
    with pytest.raises(DataError, match=r"rows\.json:2:15 is not JSON"):
        open_source(path)
    path.write_text('[{"messages": []}\n {}]')
    with pytest.raises(DataError, match=r"rows\.json:2 has no comma"):
        open_source(path)
    path.write_text("[ ]")
    assert len(open_source(path)) == 0


def test_files_that_are_not_there_or_not_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        open_source(tmp_path / "gone.jsonl")
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"rows\.csv is not a kind"):
        open_source(tmp_path / "rows.csv")
    with pytest.raises(DataError, match=r"holds no \.parquet"):
        open_source(tmp_path)
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet is not a parquet file"):
        open_source(tmp_path)


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    for name, count in (("b.jsonl", 2), ("a.jsonl", 3), ("a.jsonl.sizes.jsonl", 9)):
        rows = [conversation(images=[], prompt=f"{name} {n}") for n in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(tmp_path)
    assert len(source) == 5
    assert [source.row(row).messages[0]["content"][0]["text"] for row in range(5)] == [
        "a.jsonl 0",
        "a.jsonl 1",
        "a.jsonl 2",
        "b.jsonl 0",
        "b.jsonl 1",
    ]
    assert [source.row(row).id for row in range(5)] == [f"row-{row}" for row in range(5)]
    (tmp_path / "c.parquet").write_text("")
    with pytest.raises(DataError, match="files of one kind"):
        open_source(tmp_path)


def test_fingerprints_follow_content_and_not_place(write_rows: Write, tmp_path: Path) -> None:
    first = open_source(write_rows(conversation())).fingerprint
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "rows.jsonl"
    copy.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert open_source(copy).fingerprint == first
    assert open_source(write_rows(conversation("A dog."))).fingerprint != first


# --- parquet ----------------------------------------------------------------------------------------------------------


def large(kind: pa.DataType) -> pa.DataType:
    """The same type as polars would write it."""
    if pa.types.is_list(kind):
        return pa.large_list(large(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, large(field.type)) for field in kind])
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def test_large_types_give_the_same_rows(digits: Config, tmp_path: Path) -> None:
    table = pq.read_table(digits.data.train).slice(0, 40)
    schema = pa.schema([pa.field(field.name, large(field.type)) for field in table.schema])
    pq.write_table(table, tmp_path / "small.parquet", row_group_size=7)
    pq.write_table(table.cast(schema), tmp_path / "large.parquet")
    assert "large_list" in str(pq.read_schema(tmp_path / "large.parquet").field("messages").type)
    small, big = open_source(tmp_path / "small.parquet"), open_source(tmp_path / "large.parquet")
    for row in range(40):
        a, b = small.row(row), big.row(row)
        assert (a.id, a.messages) == (b.id, b.messages)
        assert [image.read() for image in a.images] == [image.read() for image in b.images]


def test_a_column_that_is_null_in_one_file_and_text_in_another(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    pq.write_table(pa.Table.from_pylist([{**plain, "system": None}]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{**plain, "system": "Be brief."}]), tmp_path / "b.parquet")
    source = open_source(tmp_path)
    assert [len(source.row(row).messages) for row in range(2)] == [2, 3]


def test_a_table_without_messages_names_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column `messages` or `conversations`; it has text"):
        open_source(tmp_path / "a.parquet")


def test_the_cache_of_row_groups_is_bounded(digits: Config, tmp_path: Path) -> None:
    table = pq.read_table(digits.data.train).slice(0, 100)
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path, row_group_size=10)
    plain = ParquetSource(path)
    ids = [plain.row(row).id for row in range(100)]
    cache = GroupCache(max_bytes=3 * table.nbytes // 10)
    source = ParquetSource(path, cache)
    for row in (row * 37 % 100 for row in range(100)):
        assert source.row(row).id == ids[row]
        assert cache.used_bytes <= cache.max_bytes
    assert cache.used_bytes > 0
