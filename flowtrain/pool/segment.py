"""A process's share of the pool as anonymous memory that the kernel frees however the run dies (contract C6).

    owner                                   reader
    memfd_create ── handle (pid, fd) ─────▶ open /proc/PID/fd/FD ── inode checked ──▶ mmap
        │                                       │
        └────────────── same pages ─────────────┘

The memory goes with its last mapping; it has no name, so nothing is left in /dev/shm and nothing is to be unlinked.
Pages appear when they are first touched, so a segment costs what was used of it. The size is sealed: no process can
make another one's mapping fault by shrinking it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import NamedTuple

from flowtrain.errors import LostProcessError, PlanError


class SegmentHandle(NamedTuple):
    """How another process of the same node reaches a segment; five numbers, so that any message can carry it.

    Attributes:
        owner: who allocates in it.
        pid: the owner's process.
        fd: the owner's file descriptor of it.
        bytes: its size.
        inode: its identity, since pids and descriptors are used again.
    """

    owner: int
    pid: int
    fd: int
    bytes: int
    inode: int


class Segment:
    """Shared memory of fixed size. Made by `create` in the owner, by `attach` elsewhere."""

    def __init__(self, owner: int, fd: int, num_bytes: int) -> None:
        self.owner = owner
        self.bytes = num_bytes
        self._fd = fd
        try:
            self.memory = memoryview(mmap.mmap(fd, num_bytes))
        except OSError as error:
            raise PlanError(
                f"the segment of {num_bytes} bytes of pool owner {owner} cannot be mapped "
                f"({error.strerror}): lower pool.bytes, or raise the memory limit of the process"
            ) from error

    @classmethod
    def create(cls, owner: int, num_bytes: int, name: str) -> Segment:
        """A new segment; `name` shows in /proc/PID/maps and need not be unique."""
        assert num_bytes > 0, f"a segment of {num_bytes} bytes"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(owner, fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, handle: SegmentHandle) -> Segment:
        """Open another process's segment. Never blocks: the file is looked at before it is opened, then checked again.

        Raises:
            LostProcessError: the owner is gone, or its descriptor is something else by now.
            PlanError: this process may not look into the owner.
        """
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            if os.stat(path).st_ino != handle.inode:
                raise _lost(handle, "its descriptor is another file by now")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise PlanError(
                    f"the segment of pool owner {handle.owner} cannot be opened through {path} ({error.strerror}): "
                    f"run producers and consumers of one node as one user in one container"
                ) from error
            raise _lost(handle, f"{path}: {error.strerror}") from error
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (handle.inode, handle.bytes):
            os.close(fd)
            raise _lost(handle, f"its descriptor is another file of {found.st_size} bytes by now")
        try:
            return cls(handle.owner, fd, handle.bytes)
        except BaseException:
            os.close(fd)
            raise

    def handle(self) -> SegmentHandle:
        """For others to attach, as long as this process lives and keeps the segment open."""
        return SegmentHandle(self.owner, os.getpid(), self._fd, self.bytes, os.fstat(self._fd).st_ino)

    def page_bytes(self) -> int:
        """Bytes of the pages touched so far, by whichever process."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor and let go of the memory; idempotent.

        The mapping itself ends with the last tensor that views it: unmapping under a live view would be a crash.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.memory = memoryview(b"")


def _lost(handle: SegmentHandle, what: str) -> LostProcessError:
    return LostProcessError(
        f"process {handle.pid}, which holds the segment of pool owner {handle.owner}, is gone ({what}): "
        f"see the log of that process for the cause"
    )
