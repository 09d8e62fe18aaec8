"""Reading in place, common to the transports that see the owner's own pages: nothing is copied, nothing goes back."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.pool.address import offset_of, owner_of
from flowtrain.pool.block import HEADER_BYTES
from flowtrain.pool.transport.base import Span


class MappedReads:
    """`read`, `write` and `release` over the memory of each attached owner."""

    def __init__(self) -> None:
        self.memories: dict[int, memoryview] = {}

    def read(self, spans: Sequence[Span], timeout: float) -> list[memoryview]:
        found = []
        for span in spans:
            start = offset_of(span.address) - HEADER_BYTES
            found.append(self.memories[owner_of(span.address)][start : start + span.bytes])
        return found

    def write(self, spans: Sequence[Span], timeout: float) -> None:
        """Nothing to do: these are the owner's pages."""

    def release(self, spans: Sequence[Span]) -> None:
        """Nothing to do: nothing was copied."""
