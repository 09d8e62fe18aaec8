"""Where copies of other owners' blocks lie: a ring in the reader's own segment, and what lies where in it.

    take(spans) ─▶ memory of each block ─▶ filled by a transport ─▶ read, written over ─▶ give(spans)
          └──────▶ runs: pieces that are contiguous here and at their owner: few transfers carry many blocks

Composition bounds what a reader holds (`flowtrain.allocator.room`): the blocks of the packs in flight to it, S bytes
none above B, with S + B ≤ the segment; a ring takes these wherever its head stands.

Invariants: a block is taken once until it is given back; what is given back is used again, what is `lost` never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flowtrain.pool.address import offset_of, owner_of, place_of
from flowtrain.pool.arena import ArenaFullError, RingArena
from flowtrain.pool.block import HEADER_BYTES
from flowtrain.pool.segment import OwnSegment
from flowtrain.pool.transport.base import Span
from flowtrain.types import Address


class Run(NamedTuple):
    """Bytes that lie together at both ends: offsets in the owner's segment and in the reader's."""

    owner: int
    there: int
    here: int
    bytes: int


class Inbox:
    """See the module's page. `segment`: the reader's own, used for nothing else."""

    def __init__(self, segment: OwnSegment) -> None:
        self.segment = segment
        self._ring = RingArena(segment.bytes)
        self._offsets: dict[Address, int] = {}
        self._lost: set[Address] = set()

    def take(self, spans: Sequence[Span]) -> list[memoryview]:
        """Memory for these blocks, in their order; all of them or none.

        Raises:
            ArenaFullError: more is held than composition allows.
        """
        twice = [place_of(span.address) for span in spans if span.address in self._offsets]
        assert not twice, f"blocks are read again before they were released: {', '.join(twice)}"
        if not self._ring.room(span.bytes for span in spans):
            raise ArenaFullError(
                f"no room for copies of {len(spans)} blocks of {sum(span.bytes for span in spans)} bytes: "
                f"{self._ring.used} of {self._ring.capacity} bytes hold {len(self._offsets)} others"
            )
        found = []
        for span in spans:
            start = self._offsets[span.address] = self._ring.allocate(span.bytes)
            found.append(self.segment.memory[start : start + span.bytes])
        return found

    def give(self, spans: Iterable[Span]) -> None:
        """These blocks are not used any longer."""
        for span in spans:
            if span.address not in self._lost:
                self._ring.free(self._offsets.pop(span.address))

    def lose(self, spans: Iterable[Span]) -> None:
        """A transfer into these was given up and may still write there: their bytes are never used again, and the ring
        comes to its end there. That is for the last seconds of a run that has lost a process."""
        self._lost.update(span.address for span in spans)

    def runs(self, spans: Sequence[Span]) -> Iterator[Run]:
        """The blocks as few pieces, in their order."""
        run: Run | None = None
        for span in spans:
            there, here = offset_of(span.address) - HEADER_BYTES, self._offsets[span.address]
            owner = owner_of(span.address)
            if run is not None and (run.owner, run.there + run.bytes, run.here + run.bytes) == (owner, there, here):
                run = run._replace(bytes=run.bytes + span.bytes)
                continue
            if run is not None:
                yield run
            run = Run(owner, there, here, span.bytes)
        if run is not None:
            yield run


def by_owner(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Runs of each owner, owners in the order of their first."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.owner, []).append(run)
    return found
