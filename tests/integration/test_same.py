"""Composition and losses depend on seed, data, config and decision log alone (contract C1), across stops too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from integration_runs import Train, losses, samples

STEP = "train.step={samples: 8}"


@pytest.mark.parametrize("freeze", ["train.freeze=[]", "train.freeze=[encoder]"])
def test_a_slowed_producer_changes_nothing(train: Train, freeze: str) -> None:
    sides = ("producers.num=2", "consumers.num=2", "train.max_steps=3", STEP, freeze, "data.eval=null")
    plain = train("emoji", *sides, name="plain")
    slowed = train(
        "emoji", *sides, "debug.delays={producer_unit_ms: {1: 60}, consumer_pack_ms: {0: 40}}", name="slowed"
    )
    assert samples(plain) == samples(slowed)
    assert losses(plain) == losses(slowed)
    assert len(losses(plain)) == 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_run_goes_on_as_one_never_stopped(
    train: Train, copy_of: Callable[[Path, str], Path], dtype: str
) -> None:
    """12 steps at once; and 4, then from 4 to 10 and lost between saves, then from 8 on with another producer count."""
    common = (STEP, "train.max_steps=12", f"model.dtype={dtype}", "data.eval=null", "checkpoint={every: 4, keep: 9}")
    whole = train("emoji", *common, name="whole")
    checkpoints = whole / "checkpoints"

    resumed = copy_of(whole, "resumed")
    train("emoji", *common, name="resumed", resume=checkpoints / "step-4")
    assert samples(resumed) == samples(whole)
    assert losses(resumed) == losses(whole)

    other = copy_of(resumed, "other")
    train("emoji", *common, "producers.num=2", name="other", resume=resumed / "checkpoints" / "step-8")
    assert samples(other) == samples(whole)
    limit = {"float32": 1e-6, "float64": 1e-10}[dtype]
    for ours, theirs in zip(losses(other), losses(whole), strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), rel=limit)

    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, other)]
    for key in ("steps", "rows", "tokens", "packs"):
        assert summaries[0][key] == summaries[1][key]


def test_epochs_train_every_row_once_each(train: Train, tmp_path: Path) -> None:
    """The last step is short; epochs differ in order; evaluation comes when it is due and at the end."""
    rows = (Path(__file__).parents[2] / "examples/emoji/data/train.jsonl").read_text().splitlines()[:21]
    data = tmp_path / "few.jsonl"
    source = Path(__file__).parents[2] / "examples/emoji/data"
    kept = []
    for line in rows:
        row = json.loads(line)
        row["images"] = [str(source / image) for image in row.get("images") or []]
        kept.append(json.dumps(row))
    data.write_text("\n".join(kept) + "\n")
    epochs = ("train.max_steps=null", "train.epochs=2", "train.eval_every=2", STEP)
    run_dir = train("emoji", *epochs, f"data.train={data}", f"data.eval={data}", "packing.lookahead=1")
    trained = [row for line in samples(run_dir).splitlines() for row in json.loads(line)["ids"]]
    first, second = trained[:21], trained[21:]
    assert sorted(first) == sorted(second) == sorted(json.loads(line)["id"] for line in rows)
    assert first != second
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["rows"] for record in records] == [8, 8, 8, 8, 8, 2]
    assert [record["step"] for record in records if "validation_metrics/loss" in record] == [2, 4, 6]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], summary["steps"], summary["rows"]["trained"]) == (0, 6, 42)
