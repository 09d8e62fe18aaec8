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
from collections.abc import Mapping
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from flowtrain.errors import LostProcessError, PlanError
from flowtrain.pool.address import MAX_SEGMENT_BYTES, Region, machine_of_owner
from flowtrain.pool.host import host_identity

Endpoints = Mapping[str, bytes]
"""By name of a transport, what it needs to reach a segment from another machine."""


class SegmentHandle(NamedTuple):
    """How another process reaches a segment; plain data, so that any message can carry it.

    Attributes:
        owner: who allocates in it; machine and local owner (`flowtrain.pool.address`).
        pid: the owner's process.
        fd: the owner's file descriptor of it; -1 for private memory.
        bytes: its size.
        inode: its identity, since pids and descriptors are used again.
        host: identity of the owner's machine: equal for two processes that can share memory.
        endpoints: what transports need to reach it from another machine.
        region: host or device memory.
    """

    owner: int
    pid: int
    fd: int
    bytes: int
    inode: int
    host: str
    endpoints: Endpoints
    region: int = Region.HOST

    @property
    def machine(self) -> int:
        """The machine's number in the plan; `host` tells whether it is this one."""
        return machine_of_owner(self.owner)


class OwnSegment(Protocol):
    """A process's own segment, whatever its memory: what the pool client and the transports use of it."""

    owner: int
    bytes: int
    memory: memoryview

    def handle(self, endpoints: Endpoints | None = None, host: str | None = None) -> SegmentHandle:
        """How others reach it, now that these transports have made themselves reachable."""

    def page_bytes(self) -> int:
        """Bytes of the pages touched so far."""

    def close(self) -> None:
        """Let go of the memory; idempotent. It ends with the last view of it."""


_here: WeakValueDictionary[int, OwnSegment] = WeakValueDictionary()
"""Segments of this process by the identity in their handle."""


def remember(identity: int, segment: OwnSegment) -> None:
    """Let other clients of this process find a segment."""
    _here[identity] = segment


def segment_here(handle: SegmentHandle) -> OwnSegment | None:
    """The open segment of this process that the handle describes; None when there is none."""
    segment = _here.get(handle.inode) if handle.pid == os.getpid() else None
    return segment if segment is not None and segment.memory.nbytes else None


def check_segment_bytes(owner: int, num_bytes: int) -> None:
    """Raises `PlanError` for a size that no segment can have."""
    if not 0 < num_bytes <= MAX_SEGMENT_BYTES:
        raise PlanError(
            f"a pool segment must have 1 to {MAX_SEGMENT_BYTES} bytes, owner {owner} is given {num_bytes}: "
            f"change pool.bytes"
        )


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
        check_segment_bytes(owner, num_bytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(owner, fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        remember(os.fstat(fd).st_ino, segment)
        return segment

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

    def handle(self, endpoints: Endpoints | None = None, host: str | None = None) -> SegmentHandle:
        """For others to attach, as long as this process lives and keeps the segment open.

        `host`: what to tell as the machine's identity instead of this one's own.
        """
        inode = os.fstat(self._fd).st_ino
        here = host or host_identity()
        return SegmentHandle(self.owner, os.getpid(), self._fd, self.bytes, inode, here, endpoints=endpoints or {})

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
