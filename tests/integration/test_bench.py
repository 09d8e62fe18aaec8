"""`flowtrain bench` from the command line: what it shows, and what of it stays when a run fails or is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration_runs import EXAMPLES
from launched import shared_files, until

STEPS, WARMUP = 3, 1
ALONE = "one_process+producers.threads=1+consumers.threads=1"
"""One thread: several meet after every product, which takes minutes where others have the cores."""


def command(run_dir: Path, modes: str, rounds: int, *overrides: str) -> list[str]:
    words = [sys.executable, "-m", "flowtrain.cli.main", "bench", str(EXAMPLES / "digits/digits.yaml")]
    words += ["--modes", modes, "--rounds", str(rounds), "--steps", str(STEPS), "--warmup", str(WARMUP)]
    words += ["--json", str(run_dir.with_name("bench.json"))]
    for override in (f"run.dir={run_dir}", "train.step={samples: 8}", "cluster.oversubscribe=true", *overrides):
        words += ["--set", override]
    return words


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_dir.with_name("bench.json").read_text())
    return found


@pytest.mark.timeout(240)
def test_what_was_measured_before_a_run_failed_is_kept(tmp_path: Path) -> None:
    """The loss of the second mode is not finite in its second step, which ends its run in the first round."""
    run_dir = tmp_path / "run"
    wrong = f"{ALONE}+train.lr=1e30"
    ended = subprocess.run(
        command(run_dir, f"{ALONE},{wrong}", 2, "train.max_nonfinite_steps=0"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "step in a row; lower train.lr" in ended.stderr.splitlines()[-1]
    assert f"ended early: round 1, {wrong}" in " ".join(ended.stdout.split())
    found = result(run_dir)
    assert found["incomplete"] == f"ended early: round 1, {wrong}"
    assert {name: len(runs) for name, runs in found["runs"].items()} == {ALONE: 1}
    folder = tmp_path / "run-bench"
    assert f"round 1, {wrong}" in (folder / "bench.html").read_text()
    assert not (folder / f"{ALONE}-1/checkpoints").exists()
    assert len((folder / f"{ALONE}-1/metrics.jsonl").read_text().splitlines()) == STEPS


@pytest.mark.timeout(240)
def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir, before = tmp_path / "run", shared_files()
    slow = "barrier_step+debug.delays.consumer_pack_ms={0: 1000}"
    second = tmp_path / f"run-bench/{slow}-1/metrics.jsonl"
    with subprocess.Popen(
        command(run_dir, f"{ALONE},{slow}", 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bench:
        try:
            until(lambda: second.is_file() and second.stat().st_size, "a step of the second mode")
            bench.send_signal(signal.SIGINT)
            out, err = bench.communicate(timeout=60)
        finally:
            bench.terminate()
    assert bench.returncode == 130, err
    assert "a checkpoint is written" not in out
    assert f"ended early: round 1, {slow}" in " ".join(out.split())
    assert list(result(run_dir)["runs"]) == [ALONE]
    assert shared_files() <= before


def test_a_mode_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    modes = "one_process,flow+pool.bytes=600KiB"
    words = command(tmp_path / "run", modes, 1)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr.startswith("flow+pool.bytes=600KiB: pool.bytes gives producer 0")
    assert not (tmp_path / "run-bench").exists()
