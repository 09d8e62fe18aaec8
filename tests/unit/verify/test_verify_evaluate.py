"""Answers of a randomly initialised folder: the same however rows are grouped, counted exactly, bad rows named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from typer import Typer
from typer.testing import CliRunner

from flowtrain.cli.evaluate import register
from flowtrain.errors import ConfigError, DataError
from flowtrain.verify.evaluate import Answerer, evaluate

NUM_ROWS = 12
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def answerer(weights_dir: Path) -> Answerer:
    return Answerer(weights_dir, "cpu")


@pytest.fixture(scope="module")
def held_out(emoji: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short rows, with and without pictures, beside a copy of their pictures."""
    folder = tmp_path_factory.mktemp("held-out")
    lines = (emoji / "data/test.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["images"]) < 4]
    text_only = [row for row in rows if not row["images"]][: NUM_ROWS // 3]
    chosen = [*text_only, *[row for row in rows if row["images"]][: NUM_ROWS - len(text_only)]]
    for row in chosen:
        for image in row["images"]:
            target = folder / image
            target.parent.mkdir(exist_ok=True)
            shutil.copy(emoji / "data" / image, target)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return folder / "rows.jsonl"


def test_answers_do_not_depend_on_the_group(answerer: Answerer, held_out: Path) -> None:
    """Padding on the left changes nothing, so a group of eight answers as rows one by one do."""
    alone = evaluate(answerer, held_out, MAX_NEW_TOKENS, group_rows=1)
    together = evaluate(answerer, held_out, MAX_NEW_TOKENS, group_rows=8)
    assert len(alone.answers) == NUM_ROWS
    assert [answer.given for answer in alone.answers] == [answer.given for answer in together.answers]
    assert len({answer.given for answer in alone.answers}) > 1


def with_answers(rows: Path, answers: dict[str, str]) -> None:
    """Rewrite the expected answers of a file."""
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    for row in stored:
        row["messages"][-1]["content"] = answers.get(row["id"], row["messages"][-1]["content"])
    rows.write_text("".join(json.dumps(row) + "\n" for row in stored))


@pytest.fixture
def rows(held_out: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(held_out.parent, tmp_path / "rows")
    return tmp_path / "rows/rows.jsonl"


def test_exact_matches_are_counted(answerer: Answerer, rows: Path) -> None:
    """The model's own answers as the expected ones, then with two changed."""
    given = {a.id: f"  {a.given}\n" for a in evaluate(answerer, rows, MAX_NEW_TOKENS).answers}
    usable = {row_id: answer for row_id, answer in given.items() if answer.strip()}
    assert len(usable) > 2
    with_answers(rows, usable)
    right = {a.id for a in evaluate(answerer, rows, MAX_NEW_TOKENS).answers if a.right}
    assert right == usable.keys()
    wrong = sorted(usable)[:2]
    with_answers(rows, dict.fromkeys(wrong, "no such answer"))
    score = evaluate(answerer, rows, MAX_NEW_TOKENS)
    assert {a.id for a in score.answers if a.right} == usable.keys() - set(wrong)
    assert score.exact_match == (len(usable) - 2) / NUM_ROWS


def test_rows_that_cannot_be_read_count_as_not_answered(answerer: Answerer, rows: Path) -> None:
    lines = rows.read_text().splitlines()
    broken = json.loads(lines[-1])
    (rows.parent / broken["images"][0]).write_bytes(b"<html>not a picture</html>")
    asked = {"id": "asked", "messages": [{"role": "user", "content": "and?"}], "images": []}
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a line"}]
    narrow = {"id": "narrow", "messages": turns, "images": ["narrow.png"]}
    Image.new("RGB", (4, 3000)).save(rows.parent / "narrow.png")
    rows.write_text("\n".join([*lines, "{not json", json.dumps(asked), json.dumps(narrow)]) + "\n")
    score = evaluate(answerer, rows, MAX_NEW_TOKENS)
    assert len(score.answers) == NUM_ROWS + 3
    assert len(score.unanswered) == 4
    reasons = {answer.id: answer.reason for answer in score.unanswered}
    assert "cannot be decoded" in reasons[broken["id"]]
    assert "does not end with an answer" in reasons["asked"]
    assert "processor refuses" in reasons["narrow"]
    assert any("is not JSON" in reason for reason in reasons.values())


def test_limit_and_empty_file(answerer: Answerer, held_out: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    score = evaluate(answerer, held_out, 1, limit=3, progress=lambda *counts: done.append(counts))
    assert len(score.answers) == 3
    assert done[-1] == (3, 3)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="has no rows"):
        evaluate(answerer, tmp_path / "empty.jsonl")


def test_incomplete_folders_are_refused(weights_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Answerer(tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(weights_dir, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Answerer(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 weights, such as model\.language_model\.norm\.weight"):
        Answerer(folder)


def test_command_prints_the_score_last_and_writes_json(weights_dir: Path, held_out: Path, tmp_path: Path) -> None:
    app = Typer()
    app.callback()(lambda: None)
    register(app)
    out = tmp_path / "score.json"
    options = ["--data", str(held_out), "--max-new-tokens", "1", "--limit", "2", "--json", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, ["evaluate", str(weights_dir), *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "exact match 0.00 % (0 of 2 rows)"
    stored = json.loads(out.read_text())
    assert (stored["rows"], stored["right"]) == (2, 0)
    assert len(stored["answers"]) == 2
