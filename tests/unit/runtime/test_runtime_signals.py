"""Real signals, in a process of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from busy import allowed

from flowtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

PROGRAM = """
import sys, time
from flowtrain.errors import FlowTrainError
from flowtrain.runtime.signals import StopRequest
stop = StopRequest(deadline_seconds=30)
stop.install()
stop.orderly = sys.argv[1] == "training"
stop.echo_seconds = 60.0 if sys.argv[2:] == ["echo"] else 0.0
try:
    print("ready", flush=True)
    for _ in range(2000):
        time.sleep(0.01)
        if stop.requested:
            print("orderly", flush=True)
            if len(sys.argv) == 2:
                raise stop.error()
except FlowTrainError as error:
    print("ended", flush=True)
    sys.exit(error.exit_code)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)])
def test_first_signal_while_training_asks(number: signal.Signals, code: int) -> None:
    with start("training") as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert (output.splitlines(), process.returncode) == (["orderly", "ended"], code)


def test_signal_while_starting_ends_at_once() -> None:
    with start("starting") as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert (output.splitlines(), process.returncode) == (["ended"], EXIT_INTERRUPTED)


def test_second_signal_ends_at_once() -> None:
    with start("training", "go-on") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "orderly\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert output.splitlines()[-1] == "ended"
    assert process.returncode == EXIT_INTERRUPTED


def test_the_same_signal_twice_counts_once_where_it_echoes() -> None:
    with start("training", "echo") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "orderly\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "orderly\n", "it goes on"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert output.splitlines()[-1] == "ended", "another one ends it at once"


def test_process_dies_with_the_one_it_is_tied_to() -> None:
    tied = (
        "import os, sys, time; from flowtrain.runtime.guard import die_with; "
        "die_with(int(sys.argv[1]), os.uname().nodename); print('tied', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as anchor:
        command = [sys.executable, "-c", tied, str(anchor.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "tied\n"
            os.kill(anchor.pid, signal.SIGKILL)
            assert process.wait(timeout=allowed(5)) == -signal.SIGKILL


HELD = """
import signal, sys, time
from flowtrain.errors import FlowTrainError
from flowtrain.runtime.signals import StopRequest
stop = StopRequest(deadline_seconds=30)
stop.install()
try:
    with stop.held():
        if sys.argv[1] == "exit":  # as Ray does
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(15))
        print("ready", flush=True)
        try:
            while not stop.requested:
                time.sleep(0.01)
        except Exception:
            print("swallowed", flush=True)
        print("over", flush=True)
except FlowTrainError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("way", "number", "lines", "code"),
    [
        ("stay", signal.SIGINT, ["over", "interrupted (SIGINT)"], EXIT_INTERRUPTED),
        ("stay", signal.SIGTERM, ["over", "terminated (SIGTERM)"], EXIT_TERMINATED),
        ("exit", signal.SIGTERM, ["terminated (SIGTERM)"], EXIT_TERMINATED),
    ],
)
def test_held_signals_are_raised_at_the_end(way: str, number: signal.Signals, lines: list[str], code: int) -> None:
    """Code that swallows exceptions, or has a handler of its own, cannot lose a signal."""
    with subprocess.Popen([sys.executable, "-c", HELD, way], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert (output.splitlines(), process.returncode) == (lines, code)


LOST = """
import contextlib, os, signal, sys, time
from pathlib import Path
from flowtrain.allocator.inventory import local_inventory
from flowtrain.allocator.make import make_plan
from flowtrain.config.loading import load_config
from flowtrain.errors import FlowTrainError
from flowtrain.runtime.signals import StopRequest
from flowtrain.runtime.start import start_stages
from flowtrain.shapes import read_shape

class Silent:
    def start(self, ranks):
        with contextlib.suppress(FlowTrainError):  # as where it falls into a destructor
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(5)
    def submit(self, *order):
        print("asked", flush=True)
    def next(self, timeout):
        time.sleep(timeout)

config = load_config(Path(sys.argv[1])).config
plan = make_plan(config, read_shape(config.model.path), local_inventory())
stop = StopRequest(deadline_seconds=30)
stop.install()
try:
    start_stages(config, plan, Silent(), Path("."), None, stop)
except FlowTrainError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def test_a_start_ends_though_its_exception_was_lost() -> None:
    command = [sys.executable, "-c", LOST, str(EXAMPLES / "digits/digits.yaml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == EXIT_TERMINATED
    asked, last = done.stdout.splitlines()
    assert asked == "asked"
    assert "the launcher is gone" in last
