"""How bytes of a segment reach a process: the border behind which shared memory and other carriers lie.

    reader                          transport                       owner's segment
      get_all(refs) ── read ───────▶ one call a pack ──────────────▶ blocks: header and payload
      put_gradients, flush ── write ▶ one call a pack ──────────────▶ the same blocks, now with gradients
      release(refs) ── release ────▶ copies are dropped

Two kinds: those whose `read` returns views of the owner's pages (`local`, `shm`), and those that copy into memory of
the reader. A client does not know which it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from flowtrain.pool.segment import SegmentHandle
from flowtrain.types import Address


class Span(NamedTuple):
    """A whole block: `address` as in `EmbeddingRef` (its payload; the header lies before), `bytes` with its header."""

    address: Address
    bytes: int


class Transport(Protocol):
    """One process's way to the segments of others. `read` and `write` raise within `timeout` seconds
    (`LostProcessError`) when a segment cannot be reached, the others at once (`PlanError` too); all name its owner.

    Attributes:
        name: its key in `pool.transport`, in `SegmentHandle.endpoints` and in the metrics.
        endpoint: what others need to reach this process's own segment; None where the handle says enough.
        pinned_bytes: bytes of attached memory that this process has page-locked.
    """

    name: str
    pinned_bytes: int

    @property
    def endpoint(self) -> bytes | None: ...

    def attach(self, handle: SegmentHandle) -> None:
        """Reach another process's segment; a second call with the same owner does nothing."""

    def read(self, spans: Sequence[Span], timeout: float) -> list[memoryview]:
        """Header and payload of each block, writable, in the order of `spans`; all spans of a pack in one call.

        They stay as they are until `release`; views show what others write meanwhile, copies do not.
        """

    def write(self, spans: Sequence[Span], timeout: float) -> None:
        """The bytes changed in the memory that `read` returned for these blocks are with the owner on return."""

    def release(self, spans: Sequence[Span]) -> None:
        """The reader is done with these blocks."""

    def detach(self, owner: int) -> None:
        """Let go of one attached segment, whose owner may be gone; nothing when it is not attached."""

    def close(self) -> None:
        """Let go of all segments; idempotent. Another process's segment is never removed."""
