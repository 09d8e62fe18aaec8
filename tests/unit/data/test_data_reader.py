"""The reader stage: the same rows whoever reads them, token ids beside metadata, both phases apart."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_rows import conversation
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.schema import Config
from flowtrain.data.blocks import IGNORED_LABEL
from flowtrain.data.order import Order
from flowtrain.data.reader import PayloadBlock, ReaderStage, SampleTokens
from flowtrain.data.show import half_blocks, masked_text, sample_text
from flowtrain.data.sources import open_source
from flowtrain.errors import DataError
from flowtrain.types import Phase, SampleMeta, SkippedRow

tokens_of = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=8)


@given(st.lists(tokens_of, max_size=6))
def test_payloads_give_back_what_was_put_in(samples: list[list[tuple[int, bool]]]) -> None:
    given_tokens = [
        SampleTokens.of(np.array([t for t, _ in s], np.int64), np.array([m for _, m in s], np.bool_)) for s in samples
    ]
    block = pickle.loads(pickle.dumps(PayloadBlock.of(given_tokens)))
    assert len(block) == len(samples)
    for index, expected in enumerate(given_tokens):
        got = block.sample(index)
        assert got.input_ids.dtype == got.labels.dtype == np.int64
        assert got.input_ids.tolist() == expected.input_ids.tolist()
        assert got.labels.tolist() == expected.labels.tolist()


def test_training_rows_come_in_seeded_order_and_held_out_rows_in_file_order(emoji: Config) -> None:
    reader = ReaderStage(emoji)
    train, payload = reader.read(Phase.TRAIN, 5590, 20, 7)
    held_out, _ = reader.read(Phase.EVAL, 10, 5, 7)
    reader.close()
    order = Order(5600, emoji.run.seed)
    assert [row.row for row in train.rows] == [order.row(position) for position in range(5590, 5610)]
    assert [row.position for row in train.rows] == list(range(5590, 5610))
    assert [row.row for row in held_out.rows] == [10, 11, 12, 13, 14]
    assert (train.start, train.phase, held_out.phase) == (5590, Phase.TRAIN, Phase.EVAL)
    assert train.block != held_out.block
    for row in train.rows:
        assert isinstance(row, SampleMeta)
        tokens = payload.sample(row.place)
        assert row.block == train.block
        assert len(tokens.input_ids) == row.tokens
        assert (tokens.labels != IGNORED_LABEL).sum() == row.trained_tokens


def test_two_readers_read_the_same(digits: Config) -> None:
    whole, payload = ReaderStage(digits).read(Phase.TRAIN, 0, 12, 0)
    other = ReaderStage(digits)
    other.read(Phase.EVAL, 0, 3, 0)
    parts = [other.read(Phase.TRAIN, start, 4, block) for block, start in ((2, 8), (0, 0), (1, 4))]
    rows = {row.position: (row.id, p.sample(row.place)) for read, p in parts for row in read.rows}
    for row in whole.rows:
        assert isinstance(row, SampleMeta)
        told, tokens = rows[row.position]
        assert told == row.id
        assert tokens.input_ids.tolist() == payload.sample(row.place).input_ids.tolist()


def test_skipped_rows_take_no_place_in_the_payload(emoji: Config, write_rows: Callable[..., Path]) -> None:
    path = write_rows(conversation(images=["gone.png"]), conversation("yes"), {"x": 1}, conversation("no"))
    config = emoji.model_copy(update={"data": emoji.data.model_copy(update={"train": path, "eval": path})})
    reader = ReaderStage(config)
    read, payload = reader.read(Phase.EVAL, 0, 4, 0)
    assert [type(row) for row in read.rows] == [SkippedRow, SampleMeta, SkippedRow, SampleMeta]
    assert [row.place for row in read.rows if isinstance(row, SampleMeta)] == [0, 1]
    assert len(payload) == 2
    assert pickle.loads(pickle.dumps(read)) == read


def test_an_empty_file_is_told(emoji: Config, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    config = emoji.model_copy(update={"data": emoji.data.model_copy(update={"train": tmp_path / "none.jsonl"})})
    with pytest.raises(DataError, match=r"none\.jsonl has no rows"):
        ReaderStage(config).read(Phase.TRAIN, 0, 1, 0)


def test_the_shown_sample_is_the_first_of_the_run(digits: Config) -> None:
    reader = ReaderStage(digits)
    text = reader.first_sample()
    assert text == sample_text(digits)
    read, _ = reader.read(Phase.TRAIN, 0, 1, 0)
    assert text is not None
    assert text.startswith(f"row {read.rows[0].id}: 22 tokens, 2 of them trained (9 %)")
    answer = open_source(digits.data.train).row(read.rows[0].row).messages[1]["content"][0]["text"]
    assert text.endswith(
        f"<|vision_start|><|image_pad|>×4<|vision_end|>Which digit is this?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦{answer}<|im_end|>⟧"
    )


def test_masked_text_and_pictures_keep_their_size(digits: Config) -> None:
    from PIL import Image

    reader = ReaderStage(digits)
    read, payload = reader.read(Phase.TRAIN, 0, 3, 0)
    for row in read.rows:
        assert isinstance(row, SampleMeta)
        assert masked_text(reader._open_measure(), payload.sample(row.place)).count("⟦") == 1
    art = half_blocks(Image.new("RGB", (300, 100), (255, 0, 0)), max_columns=24, max_rows=12)
    assert {len(line) for line in art} == {24}
    assert len(art) == 4
    assert set(art[0]) == {("#ff0000", "#ff0000")}
