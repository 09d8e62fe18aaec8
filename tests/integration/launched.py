"""A run started from the command line, watched and disturbed from outside.

    with Launch("digits", run_dir, "train.max_steps=400") as launch:
        launch.until_step(3)
        launch.kill(launch.stage("producer"))
        launch.end(within=15)

What is waited for is always something that can be seen (a line, a file, a process), never a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from busy import allowed
from integration_runs import EXAMPLES

Value = TypeVar("Value")

START_SECONDS = 120.0
SMALL = (
    "telemetry.progress=plain",
    "train.step={samples: 8}",
    "train.max_steps=2000",
    "train.epochs=null",
    "data.eval=null",
    "checkpoint.export=false",
    "cluster.oversubscribe=true",
)


def until(look: Callable[[], Value], what: str, within: float = START_SECONDS) -> Value:
    """The first true value of `look`; fails the test, naming `what`, when there is none in time."""
    deadline = time.monotonic() + within
    while not (value := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within:g} s for {what}")
        time.sleep(0.02)
    return value


def shared_files() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm"))


class Launch:
    """One `flowtrain launch`; on exit whatever is left of it is ended."""

    def __init__(
        self,
        example: str,
        run_dir: Path,
        *overrides: str,
        resume: str | None = None,
        replay: Path | None = None,
        plan: Path | None = None,
        dashboard: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self._shared_before = shared_files()
        began = time.monotonic_ns()
        self._out, self._err = (run_dir.with_name(f"{run_dir.name}-{began}.{name}") for name in ("out", "err"))
        command = [sys.executable, "-m", "flowtrain.cli.main", "launch", str(EXAMPLES / example / f"{example}.yaml")]
        for override in (*SMALL, f"run.dir={run_dir}", *overrides):
            command += ["--set", override]
        for option, value in (("--resume", resume), ("--replay", replay), ("--plan", plan)):
            command += [option, str(value)] if value is not None else []
        command += ["--dashboard"] if dashboard else []
        with self._out.open("w") as out, self._err.open("w") as err:
            self.launcher = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.processes()
        for process in self._seen.values():
            with suppress(psutil.NoSuchProcess):
                if process.is_running():
                    process.kill()
        self.launcher.wait(timeout=30)

    # --- what can be seen ---------------------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        lines = self.err.splitlines()
        assert lines, f"nothing on stderr; stdout ends with {self.out[-500:]!r}"
        return lines[-1]

    def metrics(self) -> list[dict[str, Any]]:
        """Complete records written so far."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = self.run_dir.glob("checkpoints/step-*/complete.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found if path.parent.suffix != ".tmp")

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything that it started, alive now; remembered for `left`."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.launcher.pid)
            for process in (root, *root.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if _alive(process)]

    def left(self) -> list[str]:
        """Processes seen earlier that still live."""
        return [f"{process.pid} {_title(process)}" for process in self._seen.values() if _alive(process)]

    @property
    def driver(self) -> psutil.Process:
        (driver,) = (child for child in psutil.Process(self.launcher.pid).children() if "driver" in _title(child))
        return driver

    def stage(self, name: str) -> psutil.Process:
        """The process of a stage, such as `producer-0`: the one that maps its file of spans."""
        file = str(self.run_dir / "spans" / name)

        def find() -> psutil.Process | None:
            return next((process for process in self.processes() if file in _maps(process)), None)

        process = until(find, f"a process that has {file} open")
        assert process is not None
        return process

    def titled(self, text: str) -> list[psutil.Process]:
        """Processes with this in their title or command line."""
        return [process for process in self.processes() if text in _title(process)]

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], Any], what: str, within: float = START_SECONDS) -> None:
        """Wait for something to be seen; a run that ends before fails the test."""

        def look_alive() -> bool:
            assert self.launcher.poll() is None or look(), f"the run ended before {what}: {self.out}\n{self.err}"
            return bool(look())

        until(look_alive, what, within)

    def until_step(self, step: int) -> None:
        """Until the record of this step is written; remembers every process alive by then."""
        self.until(lambda: any(record["step"] >= step for record in self.metrics()), f"step {step}")
        self.processes()

    def end(self, within: float) -> int:
        """The exit code; everything that the run started is gone by then, and nothing new lies in /dev/shm.

        `within`: seconds, as a machine has them that does nothing else.
        """
        code = self.launcher.wait(timeout=allowed(within))
        self.assert_gone(within=1.0)
        return code

    def assert_gone(self, within: float) -> None:
        deadline = time.monotonic() + allowed(within)
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"alive {within:g} s after the end: {left}"
        assert not self.shared_left(), f"left in /dev/shm: {self.shared_left()}"

    def shared_left(self) -> set[str]:
        """New in /dev/shm and open in no living process (others may use it at the same time)."""
        new = shared_files() - self._shared_before
        return {name for name in new if not _is_open(f"/dev/shm/{name}")}

    # --- disturbing ---------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        self.processes()
        self.launcher.send_signal(number)

    def kill(self, *processes: psutil.Process) -> None:
        """SIGKILL, all of them before anything can follow from the first."""
        self.processes()
        for process in processes:
            process.suspend()
        for process in processes:
            process.kill()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "?"


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""


def _is_open(path: str) -> bool:
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if path in _maps(process):
                return True
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(file).startswith(path):
                        return True
    return False
