"""A segment of a process that is producer and consumer at once: private memory, found by number within the process."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

from flowtrain.errors import PlanError
from flowtrain.pool.host import host_identity
from flowtrain.pool.segment import Endpoints, SegmentHandle, check_segment_bytes, remember

_numbers = itertools.count(1)


class PrivateSegment:
    """Anonymous memory of fixed size; pages appear when they are touched. The same calls as `Segment`."""

    def __init__(self, owner: int, num_bytes: int) -> None:
        check_segment_bytes(owner, num_bytes)
        self.owner = owner
        self.bytes = num_bytes
        self._number = -next(_numbers)
        try:
            self._mapping: mmap.mmap | None = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise PlanError(
                f"a pool segment of {num_bytes} bytes cannot be mapped ({error.strerror}): "
                f"lower pool.bytes, or raise the memory limit of the process"
            ) from error
        self.memory = memoryview(self._mapping)
        remember(self._number, self)

    def handle(self, endpoints: Endpoints | None = None, host: str | None = None) -> SegmentHandle:
        """For other clients of this process; others reach it by an endpoint, or not at all."""
        here = host or host_identity()
        return SegmentHandle(self.owner, os.getpid(), -1, self.bytes, self._number, here, endpoints=endpoints or {})

    def page_bytes(self) -> int:
        """Bytes of the pages touched so far."""
        if self._mapping is None:
            return 0
        num_pages = -(-self.bytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * num_pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(self.bytes), resident) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return sum(flag & 1 for flag in resident) * mmap.PAGESIZE

    def close(self) -> None:
        """Let go of the memory; idempotent. It ends with the last view of it."""
        self._mapping = None
        self.memory = memoryview(b"")
