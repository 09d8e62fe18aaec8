"""One process that is producer and consumer at once: segments are private memory, found by number."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from weakref import WeakValueDictionary

from flowtrain.errors import LostProcessError, PlanError
from flowtrain.pool.segment import SegmentHandle

_numbers = itertools.count(1)


class _Memory:
    """Anonymous memory of fixed size; pages appear when they are touched."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0, f"a segment of {num_bytes} bytes"
        try:
            self.mapping = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise PlanError(
                f"a pool segment of {num_bytes} bytes cannot be mapped ({error.strerror}): "
                f"lower pool.bytes, or raise the memory limit of the process"
            ) from error
        self.view = memoryview(self.mapping)
        self.bytes = num_bytes

    def page_bytes(self) -> int:
        num_pages = -(-self.bytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * num_pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(self.bytes), resident) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return sum(flag & 1 for flag in resident) * mmap.PAGESIZE


_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
"""Segments of this process by the number in their handle; one ends with the last transport or view that holds it."""


class LocalTransport:
    """Several transports of one process see the same segments."""

    def __init__(self) -> None:
        self._segments: dict[int, _Memory] = {}

    def open(self, owner: int, num_bytes: int) -> SegmentHandle:
        assert owner not in self._segments, f"owner {owner} has a segment already"
        number, memory = next(_numbers), _Memory(num_bytes)
        self._segments[owner] = _memories[number] = memory
        return SegmentHandle(owner, os.getpid(), -1, num_bytes, number)

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner in self._segments:
            return
        memory = _memories.get(handle.inode) if handle.pid == os.getpid() else None
        if memory is None:
            raise LostProcessError(
                f"the segment of pool owner {handle.owner} in process {handle.pid} is not in this one "
                f"({os.getpid()}), or was closed: set pool.transport: shm for a run of several processes"
            )
        self._segments[handle.owner] = memory

    def view(self, owner: int, offset: int, num_bytes: int) -> memoryview:
        return self._segments[owner].view[offset : offset + num_bytes]

    def page_bytes(self, owner: int) -> int:
        return self._segments[owner].page_bytes()

    def close(self) -> None:
        self._segments.clear()
