"""One process that is producer and consumer at once: every segment of the process, seen where it lies."""

from __future__ import annotations

import os

from flowtrain.errors import LostProcessError
from flowtrain.pool.segment import SegmentHandle, segment_here
from flowtrain.pool.transport.mapped import MappedReads


class LocalTransport(MappedReads):
    """Several clients of one process see the same segments."""

    name = "local"
    endpoint: bytes | None = None
    pinned_bytes = 0  # the owner's client, which is in this process, has locked the pages

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner in self.memories:
            return
        segment = segment_here(handle)
        if segment is None:
            raise LostProcessError(
                f"the segment of pool owner {handle.owner} in process {handle.pid} is not in this one "
                f"({os.getpid()}), or was closed: set pool.transport: shm for a run of several processes"
            )
        self.memories[handle.owner] = segment.memory

    def detach(self, owner: int) -> None:
        self.memories.pop(owner, None)

    def close(self) -> None:
        self.memories.clear()
