"""`flowtrain data show | check | scan` on the example jobs and on rows of every kind of fault."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from data_rows import EXAMPLES, conversation
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from flowtrain.cli import data as command
from flowtrain.cli.data_row import show_row
from flowtrain.data.survey import open_builder, percentile
from flowtrain.errors import DataError
from flowtrain.types import Phase

Write = Callable[..., Path]


def run(*arguments: object) -> str:
    """What the command prints; its error is raised."""
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., Path]:
    def write(train: Path, **data: Any) -> Path:
        path = tmp_path / "run.yaml"
        model = EXAMPLES / "emoji" / "model"
        path.write_text(json.dumps({"model": {"path": str(model)}, "data": {"train": str(train), **data}}))
        return path

    return write


def rows_of_every_kind(tmp_path: Path) -> Sequence[Any]:
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    return (
        {"id": "good", **conversation("yes")},
        {"id": "cut", **conversation(images=["cut.png"])},
        {"id": "gone", **conversation(images=["gone.png"])},
        {"id": "text", **conversation("fine", images=[], prompt="Say [bold]fine[/bold]")},
        {"id": "long", **conversation("word " * 2000)},
        {"id": "mute", "messages": [{"role": "user", "content": "hi"}]},
    )


def test_show_prints_the_mask_the_sizes_and_json(tmp_path: Path) -> None:
    result = tmp_path / "row.json"
    printed = run("show", EXAMPLES / "digits" / "digits.yaml", "--json", result)
    assert "⟦" in printed
    assert "22 tokens: 18 text, 4 image; 2 trained" in printed
    assert "32 × 32" in printed
    (shown,) = json.loads(result.read_text())
    assert len(shown["input_ids"]) == len(shown["labels"]) == 22
    assert sum(label >= 0 for label in shown["labels"]) == shown["tokens"]["trained"] == 2
    assert shown["text"] in printed


def test_show_finds_rows_by_number_and_by_id(tmp_path: Path) -> None:
    job = EXAMPLES / "emoji" / "emoji.yaml"
    assert "row 7 · emoji-00007" in run("show", job, "--row", 7)
    printed = run("show", job, "--row", "emoji-05602", "--split", "eval", "--count", 2)
    assert "row 2 · emoji-05602" in printed
    assert "row 3 · emoji-05603" in printed
    with pytest.raises(DataError, match=r"has no row emoji-9: it has 5600 rows"):
        run("show", job, "--row", "emoji-9")


def test_show_on_a_terminal_colours_the_mask_and_draws_the_pictures(emoji: Any) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=120)
    show_row(open_builder(emoji, Phase.TRAIN), 1, console)
    printed = file.getvalue()
    assert "\x1b[1;32mfirst quarter moon symbol<|im_end|>" in printed
    assert "⟦" not in printed
    assert printed.count("▀") == 24 * 12


def test_show_tells_why_a_row_cannot_be_used(write_rows: Write, config_of: Write, tmp_path: Path) -> None:
    job = config_of(write_rows(*rows_of_every_kind(tmp_path)))
    assert "cannot be used, image-missing" in run("show", job, "--row", "gone")
    assert "Say [bold]fine[/bold]" in run("show", job, "--row", "text")


def test_check_counts_each_reason_and_names_rows(write_rows: Write, config_of: Write, tmp_path: Path) -> None:
    path = write_rows(*rows_of_every_kind(tmp_path))
    result = tmp_path / "check.json"
    printed = run("check", config_of(path, eval=str(path)), "--json", result)
    told = json.loads(result.read_text())
    assert told["train"] == told["eval"]
    assert (told["train"]["rows"], told["train"]["usable"]) == (6, 2)
    named = {reason: [row["id"] for row in found["examples"]] for reason, found in told["train"]["reasons"].items()}
    assert named == {
        "image-undecodable": ["cut"],
        "image-missing": ["gone"],
        "too-long": ["long"],
        "no-trained-token": ["mute"],
    }
    assert str(tmp_path / "gone.png") in printed
    assert "cut.png) is damaged" in printed


def test_check_ends_as_the_run_would(write_rows: Write, config_of: Write, tmp_path: Path) -> None:
    job = config_of(write_rows(*rows_of_every_kind(tmp_path)))
    with pytest.raises(DataError, match=r"3 of the 6 train rows .* set data\.on_bad_sample: skip") as caught:
        run("check", job, "--set", "data.on_bad_sample=error")
    assert caught.value.exit_code == 3
    with pytest.raises(DataError, match=r"1 of the 6 train rows .* set packing\.on_long_row: skip"):
        run("check", job, "--set", "packing.on_long_row=error")
    with pytest.raises(DataError, match="none of the 1 rows"):
        run("check", config_of(write_rows(conversation(images=["gone.png"]))))
    with pytest.raises(DataError, match="has no rows"):
        run("check", config_of(write_rows("")))


def test_scan_writes_sizes_beside_the_rows(write_rows: Write, config_of: Write, tmp_path: Path) -> None:
    path = write_rows(*rows_of_every_kind(tmp_path))
    result = tmp_path / "scan.json"
    printed = run("scan", config_of(path), "--json", result)
    lines = [json.loads(line) for line in Path(f"{path}.sizes.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["good", "cut", "gone", "text", "long", "mute"]
    assert lines[0]["images"] == [[32, 32, 4, 16]]
    assert lines[0]["vision_tokens"] == 4
    assert lines[2] == {"row": 2, "id": "gone", "skipped": "image-missing"}
    assert "p50" in printed
    told = json.loads(result.read_text())
    assert told["file"] == f"{path}.sizes.jsonl"
    assert told["percentiles"]["patches"]["max"] == 16
    assert {file.name for file in tmp_path.iterdir() if "sizes" in file.name} == {"rows.jsonl.sizes.jsonl"}


def test_scan_into_a_folder_that_is_not_there(write_rows: Write, config_of: Write, tmp_path: Path) -> None:
    job = config_of(write_rows(conversation()))
    with pytest.raises(DataError, match=r"choose another file by --out"):
        run("scan", job, "--out", tmp_path / "none" / "sizes.jsonl")


@given(values=st.lists(st.integers(0, 100), min_size=1).map(sorted), share=st.floats(0, 1))
def test_percentile_is_the_smallest_value_with_enough_below(values: list[int], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert found == values[0] or sum(value < found for value in values) < share * len(values)
