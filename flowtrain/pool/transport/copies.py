"""Blocks that another reader of this machine has copied, seen where the copies lie: they cross once for all readers.

    owner ══ nixl, ray ══▶ reader that copies: an `Inbox` in its segment ──▶ its own views
                                               │ the same pages
                                               └──▶ readers beside it: an `Inbox` of the same history

Readers of one data-parallel rank get the same packs in the same order. So they take and give back the same blocks in
the same order, and the ring of each says where the copy of a block lies: nothing is sent. As on every access, the
block's header is checked.

What the readers see to (`flowtrain.consumer.stage`): a block is read here once it has been read there, it is given back
there once it is not used here any more, and nobody writes gradients here.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.pool.address import place_of
from flowtrain.pool.pin import Pinned, pin, unpin
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport.base import Span
from flowtrain.pool.transport.choice import COPIES
from flowtrain.pool.transport.inbox import Inbox


class CopiesTransport:
    """`copies`: the segment of the reader that copies, which has read nothing so far."""

    name = COPIES
    endpoint: bytes | None = None

    def __init__(self, copies: SegmentHandle) -> None:
        self._segment = Segment.attach(copies)
        self._inbox = Inbox(self._segment)
        self._pin = pin(self._segment.memory)
        self.pinned_bytes = self._pin.bytes

    def attach(self, handle: SegmentHandle) -> None:
        """Nothing to do: the other reader reaches the owner."""

    def read(self, spans: Sequence[Span], timeout: float) -> list[memoryview]:
        return self._inbox.take(spans)

    def write(self, spans: Sequence[Span], timeout: float) -> None:
        told = "; ".join(place_of(span.address) for span in spans)
        raise AssertionError(f"gradients are written by a reader that sees the copies of another one: {told}")

    def release(self, spans: Sequence[Span]) -> None:
        self._inbox.give(spans)

    def detach(self, owner: int) -> None:
        """Nothing to do: no block of an owner that leaves is held."""

    def close(self) -> None:
        unpin(self._pin)
        self._pin = Pinned()
        self._segment.close()
