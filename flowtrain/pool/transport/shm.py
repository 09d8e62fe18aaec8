"""Shared memory between the processes of one node: an anonymous file for each segment, opened through its owner."""

from __future__ import annotations

from flowtrain.pool.segment import Segment, SegmentHandle


class ShmTransport:
    """Segments by owner; one descriptor and one mapping for each, however many blocks are read."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def open(self, owner: int, num_bytes: int) -> SegmentHandle:
        assert owner not in self._segments, f"owner {owner} has a segment already"
        self._segments[owner] = Segment.create(owner, num_bytes, f"flowtrain-pool-{owner}")
        return self._segments[owner].handle()

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner not in self._segments:
            self._segments[handle.owner] = Segment.attach(handle)

    def view(self, owner: int, offset: int, num_bytes: int) -> memoryview:
        return self._segments[owner].memory[offset : offset + num_bytes]

    def page_bytes(self, owner: int) -> int:
        return self._segments[owner].page_bytes()

    def close(self) -> None:
        while self._segments:
            self._segments.popitem()[1].close()
