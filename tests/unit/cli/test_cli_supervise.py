"""The supervision of a driver, with real small programs in its place: exit codes, signals, orphans.

Handlers of these programs write by `os.write`: the next signal may come while one runs, and `print` is not reentrant.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowtrain.cli.supervise import FORCE_SECONDS, Asked

LAUNCHER = """
import json, os, sys
from flowtrain.cli.supervise import supervise
ended = supervise([sys.executable, "-c", sys.argv[1]], sys.argv[2], os.environ, float(sys.argv[3]))
print(json.dumps([ended.returncode, ended.asked and ended.asked.name, ended.killed, ended.num_swept]), flush=True)
"""
ORDERLY = """
import os, signal, sys, time
def stop(number, frame):
    os.write(1, b"got %d\\n" % number)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
DEAF = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.write(1, b"got %d\\n" % number))
print("ready", flush=True)
while True:
    time.sleep(60)
"""
ORPHANS = """
import os, subprocess, sys
code = "import os, signal, sys, time; {setup}; print(os.getpid(), flush=True); time.sleep(60)"
for setup, env in (
    ("0", None),
    ("os.setsid()", None),
    ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", None),
    ("0", {"PATH": "/usr/bin"}),
):
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    child = subprocess.Popen(
        [sys.executable, "-c", middle, code.format(setup=setup)],
        env=env, start_new_session=True, stdout=subprocess.PIPE,
    )
    print("orphan", child.stdout.readline().decode().strip(), flush=True)
    child.wait()
"""


class Launched:
    """A launcher process that supervises a program."""

    def __init__(self, program: str, run_id: str, patience: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, program, run_id, str(patience)], stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        while not self.lines or self.lines[-1] != text:
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line.strip())

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> list[Any]:
        """[returncode, asked, killed, num_swept], long before the launcher's patience is over."""
        output, _ = self.process.communicate(timeout=60)
        self.lines += output.splitlines()
        assert self.process.returncode == 0
        result: list[Any] = json.loads(self.lines[-1])
        return result


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(program: str, patience: float = 600.0) -> Launched:
        started.append(Launched(program, f"test-{os.getpid()}-{time.monotonic_ns()}", patience))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.communicate(timeout=10)


@pytest.mark.parametrize("code", [0, 1, 3, 5])
def test_the_exit_code_is_the_drivers(launch: Launch, code: int) -> None:
    assert launch(f"import sys; sys.exit({code})").ended() == [code, None, False, 0]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGTERM"])
def test_a_driver_that_dies_by_a_signal_is_told_apart(launch: Launch, name: str) -> None:
    number = int(signal.Signals[name])
    assert launch(f"import os; os.kill(os.getpid(), {number})").ended() == [-number, None, False, 0]


@pytest.mark.parametrize(("sent", "got"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_a_signal_is_passed_on(launch: Launch, sent: str, got: str) -> None:
    launched = launch(ORDERLY)
    launched.read_until("ready")
    launched.send(signal.Signals[sent])
    number = int(signal.Signals[got])
    assert launched.ended() == [128 + number, got, False, 0]
    assert f"got {number}" in launched.lines


def test_the_driver_has_a_session_of_its_own(launch: Launch) -> None:
    """Else Ctrl-C of a terminal would reach it, and Ray's daemons, beside what the launcher passes on."""
    launched = launch("import os; print(os.getsid(0) == os.getpid())")
    assert launched.ended()[0] == 0
    assert launched.lines[0] == "True"


@pytest.mark.parametrize(
    ("numbers", "passed_on", "left"),
    [
        (("SIGINT",), ("SIGINT",), 30.0),
        (("SIGTERM", "SIGTERM", "SIGHUP"), ("SIGTERM", "SIGTERM", "SIGTERM"), 28.0),
        (("SIGINT", "SIGINT"), ("SIGINT", "SIGINT"), FORCE_SECONDS),
        (("SIGTERM", "SIGINT", "SIGINT"), ("SIGTERM", "SIGINT", "SIGINT"), FORCE_SECONDS),
        (("SIGINT", "SIGINT", "SIGINT"), ("SIGINT", "SIGINT", None), 0.0),
    ],
)
def test_each_signal_leaves_less_time(numbers: Sequence[str], passed_on: Sequence[str | None], left: float) -> None:
    """One signal a second; `left`: seconds from the last one to the kill."""
    asked, now = Asked(patience_seconds=30.0), 100.0
    for number, expected in zip(numbers, passed_on, strict=True):
        now += 1.0
        heard = asked.hear(signal.Signals[number], now, listens=True)
        assert (heard and heard.name) == expected
    assert asked.first == signal.Signals[numbers[0]]
    assert asked.deadline - now == left


def test_a_driver_without_handlers_is_told_nothing() -> None:
    asked = Asked(patience_seconds=30.0)
    assert asked.hear(signal.SIGHUP, now=7.0, listens=False) is None
    assert (asked.first, asked.deadline) == (signal.SIGTERM, 7.0)


def test_a_second_interrupt_ends_a_deaf_driver(launch: Launch) -> None:
    launched = launch(DEAF)
    launched.read_until("ready")
    launched.send(signal.SIGINT)
    launched.read_until("got 2")
    launched.send(signal.SIGINT)
    assert launched.ended() == [-signal.SIGKILL, "SIGINT", True, 0]
    assert launched.lines.count("got 2") == 2


def test_a_third_interrupt_does_not_wait(launch: Launch) -> None:
    launched = launch(DEAF)
    launched.read_until("ready")
    for count in (1, 2, 3):
        launched.send(signal.SIGINT)
        if count < 3:
            launched.read_until("got 2")
            launched.lines.append(f"interrupt {count}")
    assert launched.ended()[1:3] == ["SIGINT", True]


def test_a_driver_that_never_ends_is_killed_after_patience(launch: Launch) -> None:
    launched = launch(DEAF, patience=0.5)
    launched.read_until("ready")
    launched.send(signal.SIGTERM)
    assert launched.ended() == [-signal.SIGKILL, "SIGTERM", True, 0]


def test_a_driver_that_is_still_starting_is_ended_at_once(launch: Launch) -> None:
    launched = launch("import time; print('ready', flush=True); time.sleep(60)")
    launched.read_until("ready")
    launched.send(signal.SIGINT)
    assert launched.ended() == [-signal.SIGKILL, "SIGINT", True, 0]


def test_nothing_that_the_driver_started_is_left(launch: Launch) -> None:
    """Orphans in the same session, in one of their own, deaf to SIGTERM, and without our environment."""
    launched = launch(ORPHANS)
    returncode, _, _, num_swept = launched.ended()
    orphans = [int(line.split()[1]) for line in launched.lines if line.startswith("orphan")]
    assert (returncode, len(orphans)) == (0, 4)
    assert num_swept == 4
    assert [pid for pid in orphans if psutil.pid_exists(pid)] == []


def test_orphans_that_end_during_the_run_are_no_zombies(launch: Launch) -> None:
    program = """
import subprocess, sys, time
middle = "import subprocess, sys; print(subprocess.Popen(['sleep', '0.1']).pid, flush=True)"
pid = int(subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, timeout=20).stdout)
deadline = time.monotonic() + 15
while time.monotonic() < deadline:
    try:
        open(f"/proc/{pid}/stat").read()
    except OSError:
        print("reaped", flush=True)
        break
    time.sleep(0.1)
"""
    launched = launch(program)
    assert launched.ended()[0] == 0
    assert "reaped" in launched.lines


def test_other_processes_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os\n"
        "from flowtrain.cli.supervise import supervise\n"
        "mine = subprocess.Popen(['sleep', '30'])\n"
        "ended = supervise([sys.executable, '-c', 'pass'], 'other-run', os.environ, 5.0)\n"
        "print(ended.num_swept, mine.poll())\n"
        "mine.kill(); mine.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "0 None"


def test_handlers_are_put_back(launch: Launch) -> None:
    code = (
        "import signal, sys, os\n"
        "from flowtrain.cli.supervise import supervise\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]\n"
        "supervise([sys.executable, '-c', 'pass'], 'x', os.environ, 5.0)\n"
        "print(before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "True"
