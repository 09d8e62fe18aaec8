"""A process's share of the pool as anonymous memory that the kernel frees however the run dies (contract C6).

    owner                                   reader
    memfd_create ── handle (pid, fd) ─────▶ open /proc/PID/fd/FD ── inode checked ──▶ mmap
        │                                       │
        └────────────── same pages ─────────────┘

The memory goes with its last mapping; it has no name, so nothing is left in /dev/shm and nothing is to be unlinked.
All pages are reserved when the segment is made (`flowtrain.pool.pages`), so a write never meets a machine that has run
out of them. The size is sealed: no process can make another one's mapping fault by shrinking it.
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
from flowtrain.pool.pages import HugePages, huge_page_bytes, huge_pages_free, populate, reserve_pages

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
            self._mapping: mmap.mmap | None = mmap.mmap(fd, os.fstat(fd).st_size)
        except OSError as error:
            raise PlanError(
                f"the segment of {num_bytes} bytes of pool owner {owner} cannot be mapped ({error.strerror}): "
                f"lower pool.bytes, or raise the memory limit of the process (ulimit -v)"
            ) from error
        self.memory = memoryview(self._mapping)[:num_bytes]

    @classmethod
    def create(
        cls, owner: int, num_bytes: int, name: str, huge_pages: HugePages = "auto", near: int | None = None
    ) -> Segment:
        """A new segment, all of its pages reserved, on NUMA node `near` if one is given.

        `name` shows in /proc/PID/maps and need not be unique.

        Raises:
            PlanError: the machine has not the memory, or not the huge pages.
        """
        check_segment_bytes(owner, num_bytes)
        whose = f"the segment of pool owner {owner}"
        page = _check_huge_pages(whose, num_bytes) if huge_pages == "explicit" else 1
        file_bytes = -(-num_bytes // page) * page
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages == "explicit" else 0)
        fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(owner, fd, num_bytes)
            assert segment._mapping is not None
            reserve_pages(segment._mapping, fd, file_bytes, huge_pages, whose, near)
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
        if found.st_ino != handle.inode or not _fits(found.st_size, handle.bytes):
            os.close(fd)
            raise _lost(handle, f"its descriptor is another file of {found.st_size} bytes by now")
        try:
            segment = cls(handle.owner, fd, handle.bytes)
            assert segment._mapping is not None
            populate(segment._mapping)
            return segment
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

    def close(self) -> None:
        """Close the descriptor and let go of the memory; idempotent.

        The mapping itself ends with the last tensor that views it: unmapping under a live view would be a crash.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._mapping = None
            self.memory = memoryview(b"")


def _fits(file_bytes: int, num_bytes: int) -> bool:
    """Whether a file is of the segment's size, or of that size in whole explicit huge pages."""
    page = huge_page_bytes()
    return file_bytes == num_bytes or (page > 0 and file_bytes == -(-num_bytes // page) * page)


def _check_huge_pages(whose: str, num_bytes: int) -> int:
    """Size of an explicit huge page; `PlanError` when there are too few."""
    page, free = huge_page_bytes(), huge_pages_free()
    need = -(-num_bytes // page) if page else 0
    if not page or need > free:
        raise PlanError(
            f"pool.huge_pages: explicit asks for {need or 'explicit'} huge pages for {whose} and the machine has "
            f"{free} of {page} bytes free: raise vm.nr_hugepages by {max(need - free, 1)}, or set it to auto"
        )
    return page


def _lost(handle: SegmentHandle, what: str) -> LostProcessError:
    return LostProcessError(
        f"process {handle.pid}, which holds the segment of pool owner {handle.owner}, is gone ({what}): "
        f"see the log of that process for the cause"
    )
