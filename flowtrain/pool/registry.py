"""Which processes of this machine hold pool memory: one small file for each, so that it can be looked at and swept.

    $XDG_RUNTIME_DIR/flowtrain/ (else the temporary folder, flowtrain-UID; mode 0700)
      RUN-OWNER-PID-MACHINE.json ── bytes in use (8, little-endian, told by the owner) │ JSON: who, since when

Nothing depends on these files: the memory itself has no name and ends with its last process. An entry whose owner is
dead is left over from a killed run and is swept: at the next start, or by `flowtrain pool sweep`.

| an entry of | owner | swept |
|---|---|---|
| this kernel and these process ids | alive while a process of that id and that start time is | once dead |
| this machine before it was started again | dead | yes |
| another container of this machine; another machine that shares the folder | unknown here | by its own side only |
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from flowtrain.errors import PlanError
from flowtrain.pool.host import host_identity, machine_name

_USED = struct.Struct("<Q")
_MAX_FILE_BYTES = 1 << 16

ASIDE = ".writing"
WRITING_SECONDS = 60
"""Longest that an entry is written; it takes a millisecond."""


class Life(Enum):
    """What is known of an entry's owner."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Entry:
    """One owner's registration.

    Attributes:
        run: name of the run, from its folder and the process that started it.
        run_dir: the run's folder.
        role: what the process is in the run, with its rank.
        owner: owner id in the pool's address space.
        pid, started: the process, and its start in clock ticks since boot.
        machine: name of the machine.
        host: identity of its kernel and process ids.
        bytes: size of the segment.
        fd: the process's descriptor of it, -1 for private memory.
        inode: identity of the segment.
    """

    run: str
    run_dir: str
    role: str
    owner: int
    pid: int
    started: int
    machine: str
    host: str
    bytes: int
    fd: int
    inode: int

    @property
    def life(self) -> Life:
        if self.host == host_identity():
            return Life.ALIVE if start_of(self.pid) == self.started else Life.DEAD
        same_boot = self.host.partition("/")[0] == host_identity().partition("/")[0]
        return Life.DEAD if self.machine == machine_name() and not same_boot else Life.ELSEWHERE


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry as found: its file, and the bytes in use when it was read."""

    path: Path
    entry: Entry
    used_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.entry), "used_bytes": self.used_bytes, "life": self.entry.life.value}


class Registration:
    """This process's own entry; `used` may be called for every block."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self.path = path
        content = _USED.pack(0) + json.dumps(asdict(entry)).encode()
        aside = path.with_suffix(ASIDE)  # an entry that is there is whole
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, content)
            self._memory: mmap.mmap | None = mmap.mmap(fd, len(content))
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def used(self, num_bytes: int) -> None:
        """Tell how many bytes of the segment are in use."""
        if self._memory is not None:
            _USED.pack_into(self._memory, 0, num_bytes)

    def close(self) -> None:
        """Take the entry away; idempotent."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            self.path.unlink(missing_ok=True)


def registry_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of this user's entries, made if need be.

    Raises:
        PlanError: it is not this user's own, or cannot be made.
    """
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_RUNTIME_DIR")
    usable = base is not None and os.access(base, os.W_OK | os.X_OK)
    folder = Path(str(base), "flowtrain") if usable else Path(tempfile.gettempdir(), f"flowtrain-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat(follow_symlinks=False)
    except OSError as error:
        raise PlanError(
            f"the registry of pool segments cannot be made in {folder} ({error.strerror}): make it writable, or set "
            f"XDG_RUNTIME_DIR"
        ) from error
    if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise PlanError(f"{folder} belongs to another user: remove it, or set XDG_RUNTIME_DIR to a folder of your own")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def register(entry: Entry, folder: Path | None = None) -> Registration:
    """Enter this process, and sweep what dead ones have left.

    Raises:
        PlanError: the folder, or its disk, has no room for the entry.
    """
    folder = folder or registry_folder()
    sweep(folder)
    path = folder / f"{entry.run}-{entry.owner}-{entry.pid}-{entry.machine}.json"
    try:
        return Registration(path, entry)
    except OSError as error:
        raise PlanError(
            f"the entry {path} of a pool segment cannot be written ({error.strerror}): make room there, or set "
            f"XDG_RUNTIME_DIR to a folder on another disk"
        ) from error


def listed(folder: Path | None = None) -> list[Listed]:
    """All entries that can be read, by run and owner."""
    found = [entry for path in _files(folder) if (entry := _read(path)) is not None]
    return sorted(found, key=lambda one: (one.entry.run, one.entry.owner))


def sweep(folder: Path | None = None) -> list[Listed]:
    """Take away the entries of dead owners, and what one left that died while it wrote; returns the entries."""
    swept = []
    for aside in (folder or registry_folder()).glob(f"*{ASIDE}"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > WRITING_SECONDS:
                aside.unlink()
    for one in listed(folder):
        if one.entry.life is Life.DEAD:
            with contextlib.suppress(OSError):  # another process sweeps too, or the folder is read-only
                one.path.unlink()
                swept.append(one)
    return swept


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def run_name(run_dir: Path, pid: int) -> str:
    """A name for a run that no other live run on this machine has."""
    kept = "".join(c if c.isalnum() or c in "._" else "_" for c in run_dir.name)
    return f"{kept[:40] or 'run'}-{pid}"


def _files(folder: Path | None) -> Iterator[Path]:
    yield from sorted((folder or registry_folder()).glob("*.json"))


def _read(path: Path) -> Listed | None:
    """None for a file that is being written, or that no run wrote."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES)
        (used,) = _USED.unpack_from(content)
        entry = Entry(**json.loads(content[_USED.size :]))
    except (OSError, ValueError, TypeError, struct.error):
        return None
    typed = all(type(getattr(entry, field.name)).__name__ == field.type for field in fields(Entry))
    return Listed(path, entry, used) if typed else None
