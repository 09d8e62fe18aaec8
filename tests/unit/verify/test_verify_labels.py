"""The reference's own label mask and its opening of pictures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowtrain.data.sources import ImageRef, RawRow
from flowtrain.errors import DataError
from flowtrain.verify.labels import IGNORED, example
from flowtrain.verify.rows import find_rows, num_images, pictures, text_of


def trained_text(processor: Any, labels: torch.Tensor) -> str:
    return processor.tokenizer.decode(labels[labels != IGNORED])


def text_row(*turns: tuple[str, str]) -> RawRow:
    messages = tuple({"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns)
    return RawRow(0, "row-0", messages, (), "here")


def test_answer_and_end_of_turn_are_trained_and_nothing_else(processor: Any, rows: list[RawRow]) -> None:
    for row in rows:
        inputs, labels = example(processor, row)
        answer = text_of(row.messages[-1])
        assert trained_text(processor, labels) == f"{answer}<|im_end|>"
        assert labels.shape == inputs["input_ids"][0].shape
        trained = labels != IGNORED
        assert torch.equal(labels[trained], inputs["input_ids"][0][trained])


def test_inputs_are_all_that_the_processor_returns(processor: Any, rows: list[RawRow]) -> None:
    row = next(row for row in rows if len(row.images) > 1)
    inputs, _ = example(processor, row)
    assert inputs.keys() == {"input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"}
    assert len(inputs["image_grid_thw"]) == len(row.images) == num_images(row.messages)


def test_every_assistant_turn_is_trained(processor: Any) -> None:
    row = text_row(
        ("system", "be short"), ("user", "one?"), ("assistant", "two"), ("user", "3?"), ("assistant", "four")
    )
    _, labels = example(processor, row)
    assert trained_text(processor, labels) == "two<|im_end|>four<|im_end|>"


def test_row_without_an_answer_trains_nothing(processor: Any) -> None:
    _, labels = example(processor, text_row(("user", "hello?")))
    assert trained_text(processor, labels) == ""


def test_template_that_changes_earlier_turns_is_refused(emoji: Path) -> None:
    from transformers import AutoProcessor

    changing = AutoProcessor.from_pretrained(emoji / "model")
    changing.chat_template = "{{ messages | length }}" + changing.chat_template
    with pytest.raises(DataError, match=r"'row-0'.*not the beginning"):
        example(changing, text_row(("user", "a"), ("assistant", "b")))


def test_pictures_are_upright_and_rgb() -> None:
    stored = io.BytesIO()
    image = Image.new("P", (8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.convert("L").save(stored, "JPEG", exif=exif)
    row = replace(text_row(("user", "?")), images=(ImageRef(stored.getvalue(), "image 1"),))
    (picture,) = pictures(row)
    assert picture.mode == "RGB"
    assert picture.size == (4, 8)


def test_broken_picture_names_row_and_image() -> None:
    row = replace(text_row(("user", "?")), images=(ImageRef(b"<html>", "image 1"),))
    with pytest.raises(DataError, match="'row-0': image 1 cannot be decoded"):
        pictures(row)


def test_rows_are_found_by_id(emoji: Path, rows: list[RawRow]) -> None:
    path = emoji / "data/train.jsonl"
    found = find_rows(path, [row.id for row in rows])
    assert [found[row.id].messages for row in rows] == [row.messages for row in rows]
    with pytest.raises(DataError, match="'nobody'"):
        find_rows(path, ["nobody"])


def test_two_rows_with_one_id_are_refused_unless_they_are_equal(tmp_path: Path) -> None:
    line = '{"id": "a", "messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "x"}]}\n'
    file = tmp_path / "rows.jsonl"
    file.write_text(line % "one" + line % "one")
    assert find_rows(file, ["a"]).keys() == {"a"}
    file.write_text(line % "one" + line % "two")
    with pytest.raises(DataError, match="rows 0 and 1 share the id 'a'"):
        find_rows(file, ["a"])
