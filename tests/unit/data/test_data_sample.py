"""Samples: the very ids that the processor gives, labels on answers only, and a reason for every row left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_rows import conversation, png

from flowtrain.config.schema import Config
from flowtrain.data.blocks import IGNORED_LABEL
from flowtrain.data.images import BadImage, EncoderInputs
from flowtrain.data.measure import Measure
from flowtrain.data.pictures import load_picture
from flowtrain.data.sample import SampleBuilder, check_expansion
from flowtrain.data.sources import RawRow
from flowtrain.errors import ConfigError, DataError
from flowtrain.types import SkippedRow

Write = Callable[..., Path]
Build = Callable[..., SampleBuilder]


def whole_call(processor: Any, raw: RawRow) -> Any:
    """What transformers' own processor returns for the row, pictures and all."""
    pictures = iter([load_picture(image, 10**9) for image in raw.images])
    messages = [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": next(pictures)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in raw.messages
    ]
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )


def reason(builder: SampleBuilder, row: int = 0) -> str:
    built = builder.build(row, row, 0, 0)
    assert isinstance(built, SkippedRow), built
    assert built.detail
    return built.reason


def decoded(builder: SampleBuilder, row: int = 0) -> tuple[str, str]:
    """The whole text, and the trained part of it."""
    built = builder.build(row, row, 0, 0)
    assert not isinstance(built, SkippedRow), built
    ids, labels = built[1]
    decode = builder.processor.tokenizer.decode
    return decode(ids), decode(labels[labels != IGNORED_LABEL])


def test_ids_mask_and_inputs_equal_the_whole_processor_call(processor: Any, emoji: Config, builder_of: Build) -> None:
    builder = builder_of(emoji.data.train)
    inputs = EncoderInputs(builder.measure, builder.source, emoji.data)
    seen = set()
    for row in range(0, 300, 2):
        raw = builder.source.row(row)
        expected = whole_call(processor, raw)
        built = builder.build(9, row, 3, 5)
        assert not isinstance(built, SkippedRow)
        sample, tokens = built
        assert tokens.input_ids.tolist() == expected["input_ids"][0].tolist()
        mask = torch.as_tensor(expected["assistant_masks"])[0].bool().tolist()
        assert (tokens.labels != IGNORED_LABEL).tolist() == mask
        assert all(label in (token, IGNORED_LABEL) for token, label in zip(*map(list, tokens), strict=True))
        assert (sample.position, sample.row, sample.block, sample.place) == (9, row, 3, 5)
        assert sample.tokens == len(tokens.input_ids)
        assert sample.trained_tokens == sum(mask)
        assert sample.vision_tokens == sum(image.tokens for image in sample.images)
        seen.add(len(sample.images))
        if sample.images:
            loaded = inputs.load(sample)
            assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
            assert len(loaded["pixel_values"]) == sample.patches
    assert 0 in seen
    assert max(seen) > 4


@pytest.mark.parametrize("answer", ["猫", "🙂", " x ", "\n\nTwo lines\n", "<image> is a tag", "é́"])
@pytest.mark.parametrize("marked", [True, False])
def test_exactly_the_answer_and_its_end_are_trained(
    write_rows: Write, builder_of: Build, answer: str, marked: bool
) -> None:
    builder = builder_of(write_rows(conversation([{"type": "text", "text": answer}])))
    if not marked:
        builder = unmarked(builder)
    text, trained = decoded(builder)
    assert trained == answer + "<|im_end|>"
    assert text.endswith(f"assistant\n{answer}<|im_end|>\n")


def unmarked(builder: SampleBuilder) -> SampleBuilder:
    """The same builder with a template that does not mark the answers."""
    processor = copy.copy(builder.processor)
    processor.chat_template = processor.chat_template.replace("{%- generation -%}", "").replace(
        "{%- endgeneration -%}", ""
    )
    measure = Measure(processor, builder.measure.shape)
    return SampleBuilder(measure, builder.source, builder.config, builder.max_row_tokens, builder.on_long_row)


def test_both_ways_of_finding_answers_agree(emoji: Config, builder_of: Build) -> None:
    builder = builder_of(emoji.data.train)
    other = unmarked(builder)
    for row in range(60):
        raw = builder.source.row(row)
        assert builder.read(raw)[0].labels.tolist() == other.read(raw)[0].labels.tolist()


def test_every_turn_of_the_assistant_is_trained_and_no_prompt(write_rows: Write, builder_of: Build) -> None:
    turns = [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("user", "d"),
        ("assistant", "e"),
    ]
    path = write_rows({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert decoded(builder_of(path))[1] == "b<|im_end|>e<|im_end|>"


def test_a_first_turn_of_the_assistant(write_rows: Write, builder_of: Build) -> None:
    builder = builder_of(write_rows({"messages": [{"role": "assistant", "content": "Hello"}]}))
    assert decoded(builder)[1] == "Hello<|im_end|>"
    assert reason(unmarked(builder)) == "template"


def test_rows_that_cannot_be_used(write_rows: Write, builder_of: Build, tmp_path: Path) -> None:
    (tmp_path / "page.jpg").write_bytes(b"<html></html>")
    (tmp_path / "strip.png").write_bytes(png(4000, 15))
    expected = {
        "no-trained-token": {"messages": [{"role": "user", "content": "hi"}]},
        "image-missing": conversation(images=["gone.png"]),
        "image-undecodable": conversation(images=["page.jpg"]),
        "image-shape": conversation(images=["strip.png"]),
        "image-count": conversation(prompt="<image> and <|image_pad|>"),
        "bad-messages": conversation(prompt="<image> and <|video_pad|>"),
        "too-long": conversation(answer="word " * 2000),
    }
    builder = builder_of(write_rows(*expected.values()))
    assert [reason(builder, row) for row in range(len(expected))] == list(expected)


@pytest.mark.parametrize("answer", ["", "  \n", []])
def test_an_end_of_turn_alone_is_no_answer(write_rows: Write, builder_of: Build, answer: Any) -> None:
    """Training it would teach the model to say nothing (every label but that one is masked)."""
    builder = builder_of(write_rows(conversation(answer)))
    assert reason(builder) == "no-trained-token"
    assert reason(unmarked(builder)) == "no-trained-token"


def test_one_empty_answer_among_others_is_as_the_template_has_it(write_rows: Write, builder_of: Build) -> None:
    turns = [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c")]
    path = write_rows({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert decoded(builder_of(path))[1] == "<|im_end|>c<|im_end|>"


def test_too_many_stored_pixels(write_rows: Write, builder_of: Build) -> None:
    assert reason(builder_of(write_rows(conversation()), max_image_pixels=1023)) == "image-too-large"


def test_a_strip_that_the_processor_lets_pass_the_cap(write_rows: Write, builder_of: Build, tmp_path: Path) -> None:
    (tmp_path / "strip.png").write_bytes(png(100, 10000))
    path = write_rows(conversation(images=["strip.png"]), conversation())
    builder = builder_of(path, max_pixels=4096)
    processor = copy.deepcopy(builder.processor)
    processor.image_processor.size = {"longest_edge": 4096, "shortest_edge": 256}
    measure = Measure(processor, builder.measure.shape)
    builder = SampleBuilder(measure, builder.source, builder.config, 1024, "skip")
    assert reason(builder, 0) == "image-shape"
    assert not isinstance(builder.build(1, 1, 0, 0), SkippedRow)


def test_an_image_is_never_cut(write_rows: Write, builder_of: Build) -> None:
    path = write_rows(conversation())
    length = len(builder_of(path).build(0, 0, 0, 0)[1].input_ids)
    assert reason(builder_of(path, max_row_tokens=length - 1)) == "too-long"
    assert not isinstance(builder_of(path, max_row_tokens=length).build(0, 0, 0, 0), SkippedRow)


def test_policies_are_kept_apart(write_rows: Write, builder_of: Build) -> None:
    path = write_rows(
        {"id": "long-1", **conversation("word " * 2000)}, {"id": "bad-1", **conversation(images=["x.png"])}
    )
    stop_long = builder_of(path, on_long_row="error")
    with pytest.raises(DataError, match=r"row long-1: .*\(too-long\); repair it, or set packing\.on_long_row: skip"):
        stop_long.build(0, 0, 0, 0)
    assert reason(stop_long, 1) == "image-missing"
    stop_bad = builder_of(path, on_bad_sample="error")
    with pytest.raises(DataError, match=r"row bad-1: .*x\.png.*set data\.on_bad_sample: skip") as caught:
        stop_bad.build(1, 1, 0, 0)
    assert caught.value.exit_code == 3
    assert reason(stop_bad, 0) == "too-long"


def test_a_template_that_refuses_a_row(write_rows: Write, builder_of: Build) -> None:
    builder = builder_of(write_rows(conversation()))
    processor = copy.copy(builder.processor)
    processor.chat_template = "{{ raise_exception('roles must alternate') }}"
    other = SampleBuilder(Measure(processor, builder.measure.shape), builder.source, builder.config, 1024, "skip")
    built = other.build(0, 0, 0, 0)
    assert isinstance(built, SkippedRow)
    assert built.reason == "template"
    assert "roles must alternate" in built.detail


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "RGB"])
def test_every_mode_takes_the_same_tokens_and_inputs(
    processor: Any, emoji: Config, write_rows: Write, builder_of: Build, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "m.png").write_bytes(png(48, 32, mode, 0 if mode in "LP" else (0, 255) if mode == "LA" else None))
    builder = builder_of(write_rows(conversation(images=["m.png"])))
    built = builder.build(0, 0, 0, 0)
    assert not isinstance(built, SkippedRow)
    assert built[0].vision_tokens == 6
    assert EncoderInputs(builder.measure, builder.source, emoji.data).load(built[0])["pixel_values"].shape[0] == 24


# --- images that change or break between header and decode ------------------------------------------------------------


def test_what_decoding_finds(
    processor: Any, emoji: Config, write_rows: Write, builder_of: Build, tmp_path: Path
) -> None:
    builder = builder_of(write_rows(conversation()))
    built = builder.build(0, 0, 0, 0)
    assert not isinstance(built, SkippedRow)
    inputs = EncoderInputs(builder.measure, builder.source, emoji.data)
    whole = inputs.load(built[0])
    for data, reason_told in (
        (png()[:60], "image-undecodable"),
        (png(64, 32), "image-shape"),
        (b"", "image-undecodable"),
        (None, "image-missing"),
    ):
        (tmp_path / "a.png").unlink(missing_ok=True)
        if data is not None:
            (tmp_path / "a.png").write_bytes(data)
        with pytest.raises(BadImage, match=r"a\.png") as caught:
            inputs.load(built[0])
        assert caught.value.reason == reason_told
    (tmp_path / "a.png").write_bytes(png())
    assert torch.equal(inputs.load(built[0])["pixel_values"], whole["pixel_values"])


def test_swapped_files_change_the_inputs(
    processor: Any, emoji: Config, write_rows: Write, builder_of: Build, tmp_path: Path
) -> None:
    (tmp_path / "b.png").write_bytes(png(colour=200))
    both = conversation(prompt="<image><image>", images=["a.png", "b.png"])
    swapped = conversation(prompt="<image><image>", images=["b.png", "a.png"])
    builder = builder_of(write_rows(both, swapped))
    samples = [builder.build(row, row, 0, 0)[0] for row in range(2)]
    first, second = (
        EncoderInputs(builder.measure, builder.source, emoji.data).load(s)["pixel_values"] for s in samples
    )
    assert not torch.equal(first, second)
    assert torch.equal(first[:16], second[16:])


def test_markers_around_an_image_are_part_of_the_row(emoji: Config, builder_of: Build) -> None:
    """A processor that writes more than image tokens is measured by the row, and its ids are its own."""
    builder = builder_of(emoji.data.train)

    class Framed(type(builder.processor)):  # type: ignore[misc]
        def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
            return f"[{super().replace_image_token(image_inputs, image_idx, **kwargs)}\n{image_idx}]"

    framed = copy.copy(builder.processor)
    framed.__class__ = Framed
    measure = Measure(framed, builder.measure.shape)
    check_expansion(measure)
    builder = SampleBuilder(measure, builder.source, builder.config, 1024, "skip")
    for row in range(0, 60, 3):
        expected = whole_call(framed, builder.source.row(row))
        built = builder.build(row, row, 0, 0)
        assert not isinstance(built, SkippedRow)
        assert built[1].input_ids.tolist() == expected["input_ids"][0].tolist()
        mask = torch.as_tensor(expected["assistant_masks"])[0].bool()
        assert built[0].trained_tokens == int(mask.sum())
        assert built[0].patches == sum(image.patches for image in built[0].images)


def test_an_expansion_that_sizes_do_not_tell_is_refused(emoji: Config, builder_of: Build) -> None:
    measure = builder_of(emoji.data.train).measure
    check_expansion(measure)

    class Moody(type(measure.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            whole = super().__call__(*args, **kwargs)
            whole["input_ids"] = [ids[:-1] for ids in whole["input_ids"]]
            return whole

    moody = copy.copy(measure.processor)
    moody.__class__ = Moody
    with pytest.raises(ConfigError, match="in a form of its own"):
        check_expansion(Measure(moody, measure.shape))


def test_rows_are_plain_json(emoji: Config, builder_of: Build) -> None:
    json.dumps(builder_of(emoji.data.train).source.row(0).messages)
