"""Runs the driver as a child, passes signals on, and leaves no process behind however it ends (contracts C9, C11).

    terminal, scheduler ──signal──▶ launcher ──────signal──────▶ driver ──▶ Ray's daemons ──▶ stages
                                       ▲  ▲                        │           │
                                       │  └── pidfd: it has ended ─┘           │
                                       └── orphans become its children ────────┘   (child subreaper)

| who asks | first time | again |
|---|---|---|
| SIGINT | SIGINT to the driver, which ends in order | SIGINT again; after 5 s, or a third time, all is killed |
| SIGTERM, SIGHUP | SIGTERM to the driver, which ends in order | SIGTERM again |

A driver that has no handler for SIGTERM yet is still starting and has nothing to save: it is killed at once. The driver
leads a session of its own, so that the terminal's Ctrl-C reaches only the launcher.

Invariant: after `supervise` every process that the driver started, directly or not, is gone, and so are the entries of
its pool segments on this machine.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from flowtrain.errors import PlanError
from flowtrain.pool.registry import sweep as sweep_registry
from flowtrain.runtime.guard import RUN_ID, marked

FORCE_SECONDS = 5.0
SWEEP_SECONDS = 10.0
TERMINATE_SECONDS = 3.0
_TICK_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Ended:
    """How the driver ended.

    Attributes:
        returncode: as `subprocess` has it: negative for a signal.
        asked: SIGINT or SIGTERM when the user asked for the end, the first one that came.
        killed: whether it was killed from here, because it did not end or had not started.
        num_swept: processes that were left and had to be ended.
    """

    returncode: int
    asked: signal.Signals | None
    killed: bool
    num_swept: int


def supervise(
    argv: Sequence[str],
    run_id: str,
    environment: Mapping[str, str],
    patience_seconds: float,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run `argv` to its end; call on the main thread.

    `patience_seconds`: from the first signal to the moment at which a driver that has not ended is killed.
    """
    with _signals() as (received, wake), _subreaper():
        tree = _Tree(run_id)
        asked = Asked(patience_seconds)
        driver = subprocess.Popen(
            argv,
            env={**environment, RUN_ID: run_id},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        try:
            killed = _watch(driver, received, wake, tree, asked)
        finally:
            num_swept = tree.sweep(driver)
            with suppress(OSError, PlanError):  # a registry that cannot be used has nothing to sweep
                sweep_registry()
        return Ended(driver.returncode, asked.first, killed, num_swept)


@dataclass(slots=True)
class Asked:
    """Who has asked for the end so far, and when a driver that has not ended by then is killed: the module's table.

    Attributes:
        patience_seconds: from the first signal on.
        first: what was asked first, as the driver is told it.
        deadline: on the clock of the `now` that `hear` is given.
    """

    patience_seconds: float
    first: signal.Signals | None = None
    deadline: float = float("inf")
    num_interrupts: int = 0

    def hear(self, number: signal.Signals, now: float, listens: bool) -> signal.Signals | None:
        """A signal came: what to pass on to the driver, or None to kill it now. `listens`: it has handlers by now."""
        forwarded = _FORWARDED[number]
        self.first = self.first or forwarded
        self.num_interrupts += number == signal.SIGINT
        if self.num_interrupts > 2 or not listens:
            self.deadline = now
            return None
        self.deadline = min(self.deadline, now + (FORCE_SECONDS if self.num_interrupts > 1 else self.patience_seconds))
        return forwarded


def _watch(
    driver: subprocess.Popen[bytes], received: deque[signal.Signals], wake: int, tree: _Tree, asked: Asked
) -> bool:
    """Wait for the driver's end, passing signals on; returns whether it was killed from here."""
    killed = False
    pidfd = os.pidfd_open(driver.pid)
    try:
        while driver.poll() is None:
            while received:
                listens = _catches(driver.pid, signal.SIGTERM)
                forwarded = asked.hear(received.popleft(), time.monotonic(), listens)
                if forwarded is not None:
                    driver.send_signal(forwarded)
            left = asked.deadline - time.monotonic()
            if left <= 0 and not killed:
                killed = True
                _kill_session(driver)
            readable, _, _ = select.select([pidfd, wake], [], [], _TICK_SECONDS if killed else min(left, _TICK_SECONDS))
            if wake in readable:
                os.read(wake, 512)
            if pidfd not in readable:
                tree.reap(driver.pid)
    finally:
        os.close(pidfd)
    return killed


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal; of a process that is gone, true (there is nothing to kill)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            mask = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def _kill_session(driver: subprocess.Popen[bytes]) -> None:
    """The driver first: it must not start others meanwhile. The sweep ends the rest."""
    driver.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(driver.pid, signal.SIGKILL)


class _Tree:
    """The processes of one run, found as descendants of this process and by the run's id in their environment."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.not_ours = {child.pid for child in psutil.Process().children()}

    def reap(self, driver_pid: int) -> None:
        """Take the exit status of orphans that ended; the driver's is left to `subprocess`."""
        with suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == driver_pid or ended.si_pid in self.not_ours:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def members(self) -> list[psutil.Process]:
        """Those alive now."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process().children():
            if child.pid not in self.not_ours:
                with suppress(psutil.NoSuchProcess):
                    found |= {process.pid: process for process in (child, *child.children(recursive=True))}
        for pid in marked(self.run_id):
            if pid not in found:
                with suppress(psutil.NoSuchProcess):
                    found[pid] = psutil.Process(pid)
        return [process for process in found.values() if process.is_running()]

    def sweep(self, driver: subprocess.Popen[bytes]) -> int:
        """End what is left, politely and then not; returns how many there were. Takes at most `SWEEP_SECONDS`."""
        if driver.poll() is None:
            _kill_session(driver)
            driver.wait(timeout=SWEEP_SECONDS)
        deadline = time.monotonic() + SWEEP_SECONDS
        terminate_until = time.monotonic() + TERMINATE_SECONDS
        seen: set[int] = set()
        while time.monotonic() < deadline:
            self.reap(driver.pid)
            left = self.members()
            if not left:
                break
            polite = time.monotonic() < terminate_until
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    if not polite:
                        process.kill()
                    elif process.pid not in seen:
                        process.terminate()
                    seen.add(process.pid)
            psutil.wait_procs(left, timeout=0.5)
        return len(seen)


@contextmanager
def _signals() -> Iterator[tuple[deque[signal.Signals], int]]:
    """Collect signals in a queue; the descriptor becomes readable when one comes. Handlers are put back at the end.

    A SIGHUP that is ignored (`nohup`) stays ignored.
    """
    received: deque[signal.Signals] = deque()

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    numbers = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in numbers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield received, reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, previous in before.items():
            signal.signal(number, previous)
        os.close(reading)
        os.close(writing)


@contextmanager
def _subreaper() -> Iterator[None]:
    """While open, processes whose parent ends become children of this one, whatever session they lead."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
