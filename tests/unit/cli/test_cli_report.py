"""`flowtrain report` on folders as they are found: whole, cut short, torn, foreign; what it says and leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from traced_run import STEPS, write_run

from flowtrain.cli.report import headline, read_report
from flowtrain.errors import ConfigError


def flowtrain(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowtrain.cli.main", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


def test_figures_of_a_whole_run(tmp_path: Path, emoji: Path) -> None:
    made, _ = read_report(write_run(tmp_path / "run", emoji))
    found = made.breakdown
    assert (found.steps, made.last_step) == ((2, 3, 4), 4)
    assert (found.step_seconds, found.ideal_seconds) == (pytest.approx(0.1), pytest.approx((0.04 + 0.05) / 2))
    assert made.telemetry_share == pytest.approx((0.004 + 4 * 0.002) / 1.2)


def test_a_run_that_is_going_or_was_killed_is_told_as_far_as_it_came(tmp_path: Path, emoji: Path) -> None:
    """No summary yet, the newest lines torn, the last step not over; the run has not made trace.json."""
    run_dir = write_run(tmp_path / "run", emoji)
    whole, _ = read_report(run_dir)
    (run_dir / "summary.json").write_text('{"exit": 0, "wal')
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rows": 1')
    with (run_dir / "traces/controller.jsonl").open("ab") as file:
        file.write(b'["q", "consumer-0", "train", 0, 400000000]\n["a", "consumer-0", \xff')
    made, _ = read_report(run_dir)
    assert (made.breakdown, made.last_step, made.telemetry_share) == (whole.breakdown, 4, None)
    assert "telemetry" not in dict(headline(made))
    ended = flowtrain("report", str(run_dir), "--json", str(tmp_path / "report.json"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "report.json").read_text())["telemetry"]["share"] is None
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {"encode", "forward", "end of step 4"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    "line", ['["q"]', "7", "null", '{"step": 1}', '["m", "one", 5]', '["s", "forward", null, 5]', '["o", 3, []]']
)
def test_lines_that_no_process_writes_are_left_out(tmp_path: Path, emoji: Path, line: str) -> None:
    run_dir = write_run(tmp_path / "run", emoji)
    whole, _ = read_report(run_dir)
    for file in (*(run_dir / "traces").iterdir(), run_dir / "metrics.jsonl"):
        file.write_text(f"{line}\n{file.read_text()}")
    (run_dir / "traces/notes.jsonl").write_text("mine\n")
    assert read_report(run_dir)[0] == whole


def test_a_process_without_a_file_ends_the_critical_path(tmp_path: Path, emoji: Path) -> None:
    run_dir = write_run(tmp_path / "run", emoji)
    answers = '["a", "producer-7", "encode", 399999999]\n'
    file = run_dir / "traces/controller.jsonl"
    file.write_text(file.read_text() + answers)
    found = read_report(run_dir)[0].breakdown
    assert sum(found.path.values()) == pytest.approx(found.step_seconds)


def test_what_is_no_traced_run_is_told_as_what_it_is(tmp_path: Path, emoji: Path) -> None:
    with pytest.raises(ConfigError, match="absent is not a folder: give that of a run"):
        read_report(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"holds no trace: run it with --set run.trace=true"):
        read_report(tmp_path)
    run_dir = write_run(tmp_path / "run", emoji)
    (run_dir / "metrics.jsonl").unlink()
    assert read_report(run_dir)[0].last_step == STEPS
    for name in ("producer-0", "consumer-0"):
        (run_dir / f"traces/{name}.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no whole step"):
        read_report(run_dir)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config.yaml: there is no such config file"):
        read_report(run_dir)


def test_a_reader_who_has_seen_enough_loses_no_file(tmp_path: Path, emoji: Path) -> None:
    """`flowtrain report RUN_DIR --json FILE | head -1`: the tables go through rich, which ends a process with 1."""
    run_dir = write_run(tmp_path / "run", emoji)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = flowtrain("report", str(run_dir), "--json", str(tmp_path / "report.json"), stdout=writing)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "report.json").read_text())["run"] == "run"
    assert (run_dir / "report.html").is_file()


def test_a_place_for_the_result_is_looked_at_first(tmp_path: Path) -> None:
    ended = flowtrain("report", str(tmp_path / "absent"), "--json", str(tmp_path / "missing/report.json"))
    assert ended.returncode == 2
    assert ended.stderr.endswith("report.json cannot be written: No such file or directory; choose a place that you "
                                 "may write to\n")  # fmt: skip
