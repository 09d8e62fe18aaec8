"""How bytes of a segment reach a process: the border behind which shared memory and other carriers lie."""

from __future__ import annotations

from typing import Protocol

from flowtrain.pool.segment import SegmentHandle


class Transport(Protocol):
    """One process's access to segments. No call waits for another process.

    Every call raises at once (`LostProcessError`, `PlanError`) when a segment cannot be reached; memory that was
    attached stays readable after its owner has died.
    """

    def open(self, owner: int, num_bytes: int) -> SegmentHandle:
        """Make this process's own segment, of fixed size and untouched."""

    def attach(self, handle: SegmentHandle) -> None:
        """Reach another process's segment; a second call with the same handle does nothing."""

    def view(self, owner: int, offset: int, num_bytes: int) -> memoryview:
        """Writable bytes of an open or attached segment. What others write there shows through without another call,
        and is complete once a message of theirs has announced it. Valid, also after `close`, until the last view of
        it is dropped.
        """

    def page_bytes(self, owner: int) -> int:
        """Bytes of the segment's pages that were touched so far."""

    def close(self) -> None:
        """Let go of all segments; idempotent. Another process's segment is never removed."""
