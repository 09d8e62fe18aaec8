"""The folder of a run: one live run at a time, an earlier one moved aside, a checkpoint chosen to go on from.

    RUN_DIR/flowtrain.lock    flock, held by the launcher and the driver: free only when both are gone
    RUN_DIR.old-N             what an earlier run left

Invariants: a folder in which a run is alive is never touched; a folder that holds anything but a run is never moved.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.running import LOCK_FILE, live_process, other_host, read_holder, this_holder

MARKS = ("config.yaml", "metrics.jsonl", "decisions.jsonl", "checkpoints")
"""Any of these shows that a folder was written by a run."""

ENDING_SECONDS = 15.0
"""How long a run whose launcher was killed may take to end."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tells a folder that cannot be written as what it is: the config's fault, or the disk's."""
    try:
        yield
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PlanError(f"{what}; free disk space, or choose another place") from error
        raise ConfigError(f"{what}; choose a place that you may write to") from error


def check_place(path: Path) -> None:
    """Tells at once what `writing` would tell when the result is there: no folder, no right, a disk that is full."""
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            return


def write_json(path: Path, value: Any) -> None:
    """What `--json` asks for, in place of what was there."""
    with writing(path):
        write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's folder, locked. `lock` is a file descriptor to hand to the driver; `notes`: lines for the user."""

    path: Path
    lock: int
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        os.close(self.lock)


def open_run_dir(path: Path, inputs: Sequence[Path] = (), keep: bool = False) -> RunDir:
    """Create or take over `path` and lock it.

    `keep`: go on in it (resume). Else an earlier run is moved aside. `inputs`: what the run reads, which must not lie
    inside a folder that is moved.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    notes = []
    try:
        names = {entry.name for entry in path.iterdir()} - {LOCK_FILE}
        if names and not keep:
            notes.append(_move_aside(path, names, inputs))
            os.close(lock)
            lock = -1
            with writing(path):
                path.mkdir(exist_ok=True)
                lock = _lock(path)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        raise
    return RunDir(path, lock, tuple(notes))


def _move_aside(path: Path, names: set[str], inputs: Sequence[Path]) -> str:
    if names.isdisjoint(MARKS):
        some = ", ".join(sorted(names)[:3])
        raise ConfigError(f"run.dir {path} holds files that no run wrote ({some}): choose an empty or new folder")
    for read in inputs:
        if read == path or path in read.parents:
            raise ConfigError(
                f"run.dir {path} holds {read}, which this run reads: choose another run.dir, or move that out of it"
            )
    pattern = re.compile(rf"{re.escape(path.name)}\.old-(\d+)")
    taken = [int(match[1]) for entry in path.parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    aside = path.with_name(f"{path.name}.old-{max(taken, default=0) + 1}")
    with writing(path):
        path.rename(aside)
    return f"moved the earlier run in {path} to {aside.name}"


def _lock(path: Path) -> int:
    """The lock of the folder now at `path`, or `ConfigError` while another run holds it."""
    deadline = time.monotonic() + ENDING_SECONDS
    file = path / LOCK_FILE
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                # Another launcher may have moved the folder aside between the two calls.
                if os.stat(file).st_ino == os.fstat(descriptor).st_ino:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(this_holder()).encode(), 0)
                    return descriptor
        except BlockingIOError:
            holder = read_holder(file)
            pid = live_process(holder)
            if pid is not None or time.monotonic() > deadline:
                host = other_host(holder)
                there = f"process {holder.get('pid', '?')} on {host}" if host else "a process that does not end"
                who = f"process {pid}" if pid is not None else there
                os.close(descriptor)
                raise ConfigError(
                    f"run.dir {path} is in use by a run that is alive ({who}): wait for it, stop it, or choose another"
                ) from None
            # Its launcher was killed and the rest is ending: flock has no time-out of its own.
            time.sleep(0.1)
        os.close(descriptor)
