"""The last line and the exit code, from what the driver left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain.cli import failure
from flowtrain.cli.outcome import Outcome, outcome_of
from flowtrain.cli.supervise import Ended
from flowtrain.errors import ConfigError, DataError, LostProcessError, PlanError
from flowtrain.telemetry.fatal import write_error
from flowtrain.telemetry.spans import Spans


def ended(returncode: int, asked: signal.Signals | None = None, killed: bool = False) -> Ended:
    return Ended(returncode, asked, killed, 0)


def test_done_says_nothing(tmp_path: Path) -> None:
    assert outcome_of(ended(0), tmp_path) == Outcome(0)
    assert outcome_of(ended(0, signal.SIGINT), tmp_path) == Outcome(0)


def test_the_drivers_own_words_come_first(tmp_path: Path) -> None:
    write_error(tmp_path, DataError("row-7: two images, one mark"))
    outcome = outcome_of(ended(3), tmp_path)
    assert outcome.exit_code == 3
    assert outcome.line is not None
    assert outcome.line.startswith("row-7: two images, one mark")
    assert outcome.traceback_file is not None
    assert str(outcome.traceback_file) in outcome.line


def test_an_abort_after_the_words_does_not_hide_them(tmp_path: Path) -> None:
    write_error(tmp_path, LostProcessError("producer 1 was killed"))
    outcome = outcome_of(ended(-signal.SIGABRT), tmp_path)
    assert outcome.exit_code == 5
    assert outcome.line is not None
    assert outcome.line.startswith("producer 1 was killed")


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        ("SIGKILL", "memory ran out"),
        ("SIGKILL", "goes on with --resume"),
        ("SIGBUS", "lower pool.bytes"),
        ("SIGABRT", "--resume"),
    ],
)
def test_a_death_without_words_is_told_from_status_and_spans(tmp_path: Path, number: str, hint: str) -> None:
    for name in ("consumer-0", "producer-1"):
        with Spans(tmp_path / "spans" / name)("train"):
            outcome = outcome_of(ended(-int(signal.Signals[number])), tmp_path)
    assert outcome.exit_code == 5
    assert outcome.line is not None
    assert f"was killed by {number} (producer-1: train); " in outcome.line
    assert hint in outcome.line


def test_words_that_the_disk_has_no_room_for_are_kept_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a file, no folder"
    folder.write_text("")
    spare = os.memfd_create("spare")
    try:
        assert write_error(folder, PlanError("cannot write step-2: No space left on device"), spare).exit_code == 4
        outcome = outcome_of(ended(4), folder, spare)
    finally:
        os.close(spare)
    assert outcome.exit_code == 4
    assert outcome.line == "cannot write step-2: No space left on device"
    assert outcome.line == capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_that_was_asked_for_is_no_loss(tmp_path: Path, asked: signal.Signals, code: int) -> None:
    for returncode in (-signal.SIGKILL, -asked):
        outcome = outcome_of(ended(returncode, asked, returncode == -signal.SIGKILL), tmp_path)
        assert outcome.exit_code == code
        assert outcome.line is not None
        assert asked.name in outcome.line


def test_a_code_without_words_is_passed_on(tmp_path: Path) -> None:
    outcome = outcome_of(ended(1), tmp_path)
    assert outcome.exit_code == 1
    assert outcome.line is not None
    assert "exit code 1" in outcome.line


def test_an_understood_failure_is_its_own_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.report(ConfigError("run.yaml:1:1: a: b")) == 2
    assert capsys.readouterr().err == "run.yaml:1:1: a: b\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_bug_wherever_it_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    error = OSError(number, os.strerror(number), "/disk/export/model.safetensors")
    assert failure.report(error) == 4
    told = f"/disk/export/model.safetensors cannot be written: {os.strerror(number)}; free disk space"
    assert capsys.readouterr().err.startswith(told)
    record = write_error(tmp_path, error)
    assert record.exit_code == 4
    assert record.line.startswith(told)


def test_a_bug_names_the_file_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IndexError) as caught:
        [][0]
    token = failure.run_dir.set(tmp_path)
    try:
        assert failure.report(caught.value) == 1
    finally:
        failure.run_dir.reset(token)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "IndexError at test_cli_outcome.py:" in lines[0]
    file = tmp_path / "launcher-traceback.txt"
    assert str(file) in lines[0]
    assert "[][0]" in file.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_in_order(number: signal.Signals, code: int) -> None:
    program = (
        "import sys, time\n"
        "from flowtrain.cli import failure\n"
        "failure.raise_on_signals()\n"
        "try:\n"
        "    try:\n        print('ready', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        print('cleaned up', flush=True)\n"
        "except BaseException as error:\n    sys.exit(failure.report(error))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (code, "cleaned up\n")
    assert number.name in errors.splitlines()[-1]
