"""Standard streams that are closed, or whose reader has gone: files stay whole, exit codes stay right."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain.telemetry.streams import reader_gone, tell

DIGITS = Path(__file__).parents[3] / "examples/digits/digits.yaml"
PRINT_IN_A_CHILD = """
import os, subprocess, sys
from flowtrain.telemetry.streams import open_standard
open_standard()
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("parent", flush=True)
print("parent", file=sys.stderr)
child = subprocess.run([sys.executable, "-c", "import sys; print('child'); print('child', file=sys.stderr)"])
os.write(file, str(child.returncode).encode())
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_a_child_prints_never_goes_into_a_file(tmp_path: Path, closed: str) -> None:
    """With stdout closed the first file that is opened would be descriptor 1."""
    command = f'exec "$0" -c "$1" "$2" {closed}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, PRINT_IN_A_CHILD, str(tmp_path / "lock")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "lock").read_text() == "0"


@pytest.mark.parametrize("words", [("launch", "absent.yaml"), ("jobs", "list", "--address", "nowhere")])
def test_a_failure_that_nobody_reads_keeps_its_exit_code(words: tuple[str, ...]) -> None:
    """`flowtrain launch … 2>&1 | head -0`: what cannot be said is still so."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "flowtrain.cli.main", *words]
        ended = subprocess.run(command, stdout=writing, stderr=writing, timeout=60, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == 2


@pytest.mark.parametrize("words", [("launch", "--help"), ("config", str(DIGITS), "--show")])
@pytest.mark.parametrize("python", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_reader_who_has_seen_enough_is_no_failure(words: tuple[str, ...], python: tuple[str, ...]) -> None:
    """`flowtrain config … --show | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, *python, "-m", "flowtrain.cli.main", *words]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", [("launch", "--help"), ("config", str(DIGITS), "--show")])
def test_output_onto_a_full_disk_is_told_as_that(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "flowtrain.cli.main", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 4
    assert (
        ended.stderr
        == "the output cannot be written: No space left on device; free disk space, or choose another place\n"
    )


def test_a_pipe_that_breaks_elsewhere_is_no_reader_who_has_gone() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not reader_gone(stream)
        os.close(reading)
        assert reader_gone(stream)
    assert not reader_gone(io.StringIO())


def test_who_tells_hears_whether_there_is_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell("one")
    file = io.StringIO()
    assert tell("two", end="", stream=file)
    assert file.getvalue() == "two"
    file.close()
    assert not tell("three", stream=file)
    assert capsys.readouterr().err == "one\n"


def test_letters_that_the_terminal_lacks_are_shown_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowtrain.cli.main", "config", str(tmp_path / "größe.yaml")]
    (tmp_path / "größe.yaml").write_text("run: {}\nmode: größer\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "gr\\xf6\\xdfe.yaml" in ended.stderr
    assert "internal error" not in ended.stderr
