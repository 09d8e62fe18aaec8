"""Shared memory between the processes of one node: an anonymous file for each segment, opened through its owner."""

from __future__ import annotations

from flowtrain.pool.pin import Pinned, pin, unpin
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport.mapped import MappedReads


class ShmTransport(MappedReads):
    """Segments by owner; one descriptor and one mapping for each, however many blocks are read."""

    name = "shm"
    endpoint: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pinned_bytes = 0
        self._segments: dict[int, Segment] = {}
        self._pins: dict[int, Pinned] = {}

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner in self._segments:
            return
        segment = self._segments[handle.owner] = Segment.attach(handle)
        self.memories[handle.owner] = segment.memory
        pinned = pin(segment.memory)
        self._pins[handle.owner] = pinned
        self.pinned_bytes += pinned.bytes

    def detach(self, owner: int) -> None:
        segment = self._segments.pop(owner, None)
        if segment is None:
            return
        pinned = self._pins.pop(owner)
        self.pinned_bytes -= pinned.bytes
        unpin(pinned)
        del self.memories[owner]
        segment.close()

    def close(self) -> None:
        for owner in list(self._segments):
            self.detach(owner)
