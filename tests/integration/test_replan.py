"""Another number of producers while the run goes on: no row is lost, repeated or moved, and the log repeats it (C1)."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from integration_runs import Train, lines, losses, samples
from launched import SMALL, Launch
from turning_rows import turning_rows

COMMON = (
    "data.shuffle=false",
    "data.eval=null",
    "train.step={samples: 8}",
    "packing={max_tokens: 512, lookahead: 1}",
)


def decisions(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in lines(run_dir / "decisions.jsonl") if entry["kind"] == kind]


def log_with(log: Path, path: Path, *changes: tuple[int, int]) -> Path:
    """A decision log with these changes of the producers' number (from step, number)."""
    entries = [json.dumps({"step": step, "kind": "replan", "producers": number}) for step, number in changes]
    path.write_text(log.read_text() + "".join(f"{entry}\n" for entry in entries))
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("freeze", ["train.freeze=[encoder]", "train.freeze=[]"])
def test_data_that_turn_bring_another_producer(train: Train, tmp_path: Path, freeze: str) -> None:
    """The rows turn behind step 8; the encoder's units then take the time that a planted delay gives them."""
    turn = 8
    rows = turning_rows(tmp_path / "turn.jsonl", 8 * turn, 8 * 30)
    common = (*COMMON, f"data.train={rows}", "train.max_steps=24", freeze)
    slow = "debug.delays={producer_unit_ms: {0: 250, 1: 250}}"
    auto = ("allocation.replan=auto", "allocation.drift_window=3")
    changed = train("emoji", *common, *auto, slow, name="changed")
    (proposal,), (change,) = decisions(changed, "proposal"), decisions(changed, "replan")
    assert turn < proposal["step"] <= turn + 20
    assert proposal["producers"] == change["producers"] == 2
    records = lines(changed / "metrics.jsonl")
    assert [record["plan/producers"] for record in records] == [
        1 if record["step"] < change["step"] else 2 for record in records
    ]
    assert next(record["step"] for record in records if record["plan/proposal"]) == proposal["step"]

    steady = train("emoji", *common, name="steady")
    assert samples(changed) == samples(steady)
    again = train("emoji", *common, *auto, name="again", replay=changed / "decisions.jsonl")
    assert samples(again) == samples(changed)
    assert losses(again) == losses(changed)
    assert [(e["step"], e["producers"]) for e in decisions(again, "replan")] == [(change["step"], 2)]
    if freeze == "train.freeze=[encoder]":
        assert losses(changed) == losses(steady)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("freeze", ["train.freeze=[encoder]", "train.freeze=[]"])
def test_producers_come_and_go(train: Train, tmp_path: Path, freeze: str) -> None:
    """Two from step 3 on, one from step 6 on, with an evaluation at either boundary; float64, where sums agree."""
    room = ("allocation.replan=auto", "allocation.drift_window=50")  # for a second one, and no drift in eight steps
    common = (*room, "data.eval=null", "train.step={samples: 8}", "train.max_steps=8", "model.dtype=float64", freeze)
    steady = train("emoji", *common, name="steady")
    log = log_with(steady / "decisions.jsonl", tmp_path / "log.jsonl", (3, 2), (6, 1))
    moved = train("emoji", *common, name="moved", replay=log)
    assert samples(moved) == samples(steady)
    for ours, theirs in zip(losses(moved), losses(steady), strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), rel=1e-10)


@pytest.fixture
def changing(train: Train, tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A log with a second producer from step 4 on, and the overrides of the run that it is of."""
    overrides = ("allocation.replan=auto", "train.freeze=[]", "checkpoint.every=2")
    short = train("digits", *SMALL, *overrides, "train.max_steps=1", name="short")
    return log_with(short / "decisions.jsonl", tmp_path / "log.jsonl", (4, 2)), overrides


def joining(launch: Launch) -> None:
    """Until the new producer is being built: the change is under way."""
    launch.until(lambda: (launch.run_dir / "spans" / "producer-1").exists(), "the second producer")


@pytest.mark.timeout(300)
def test_a_producer_killed_while_it_joins_ends_the_run(changing: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    log, overrides = changing
    with Launch("digits", tmp_path / "run", *overrides, replay=log) as launch:
        joining(launch)
        stage = launch.stage("producer-1")
        launch.kill(stage)
        assert launch.end(within=15) == 5, launch.err
        assert launch.last_line.startswith(f"producer 1 (pid {stage.pid}) died "), launch.err
        assert launch.checkpoints() == [2]
        assert "Traceback" not in launch.err


@pytest.mark.timeout(300)
def test_a_signal_while_a_producer_joins_ends_the_run_in_order(
    changing: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    log, overrides = changing
    with Launch("digits", tmp_path / "run", *overrides, replay=log) as launch:
        joining(launch)
        launch.signal(signal.SIGTERM)
        assert launch.end(within=40) == 143, launch.err
        last = launch.checkpoints()[-1]
        steps = [record["step"] for record in launch.metrics()]
        assert steps == list(range(1, last + 1)), "what was trained is not what was saved"
        assert last >= 3
