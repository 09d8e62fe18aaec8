"""The ring of a segment: blocks are allocated in order, freed in any order, and reclaimed from the tail (contract C6).

    0            tail                                     head        capacity
    ┌────────────┬─────────┬─────────┬─────────┬──────────┬───────────┐
    │    room    │ live    │ freed   │ live    │ live     │   room    │
    └────────────┴─────────┴─────────┴─────────┴──────────┴───────────┘
                 ▲ reclaimed next, once freed             ▲ allocated next

1. `allocate` puts a block at the head. One that would straddle the end starts at 0 instead, and the bytes left over
   at the end become a *pad*: charged like a block, free from the start, reclaimed with the blocks before it. A *fence*
   is kept like the end: no block lies on both sides of one, since memory is page-locked from fence to fence.
2. `free` marks a block, then reclaims from the tail as long as the oldest entry is free.
3. A ring that has become empty starts again at 0.

Invariants: entries lie one after the other from tail to head; `used` is their sum and never above `capacity`; the
oldest entry is live. The state before an allocation depends only on which blocks were allocated, in
which order, and which of them are freed, not on when or in which order they were freed: so two rings that see the
same allocations and have seen the same frees by each of them hand out the same offsets.

Bound: blocks of at most B bytes each, S bytes in all, fit into a ring that holds nothing else when S + F·B ≤ capacity,
wherever its head stands. F is the number of fences, the end included (1 up to `FENCE_BYTES`). Proof: on its way from
the head once around, a pad is made at most once at each of them, and is smaller than the block that did not fit; so
when a block of b bytes is asked for, at most S - b + F·B bytes are taken and b more do not reach around to the tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from flowtrain.pool.block import ALIGNMENT

FENCE_BYTES = 64 * 2**30
"""Most memory that is page-locked by one call, and so the range within which a block must lie."""


class ArenaFullError(AssertionError):
    """An allocation that was not reserved: the two rings of an owner have come apart."""


@dataclass(slots=True)
class _Entry:
    offset: int
    num_bytes: int
    freed: bool


class RingArena:
    """See the module's page. `capacity` in bytes, rounded down to whole cache lines; `fence`: bytes between fences.

    >>> ring = RingArena(256)
    >>> ring.allocate(128), ring.allocate(64)
    (0, 128)
    """

    def __init__(self, capacity: int, fence: int = FENCE_BYTES) -> None:
        assert fence > 0, "a fence after every byte"
        assert fence % ALIGNMENT == 0, f"a fence every {fence} bytes is not at a multiple of {ALIGNMENT}"
        self.capacity = capacity - capacity % ALIGNMENT
        self.fence = fence
        self.used = 0
        self._head = 0
        self._entries: deque[_Entry] = deque()
        self._live: dict[int, _Entry] = {}

    def room(self, sizes: Iterable[int]) -> bool:
        """Whether blocks of these sizes can be allocated now, one after the other."""
        head, used = self._head, self.used
        for num_bytes in sizes:
            pad, offset = self._place(head, num_bytes)
            used += pad + num_bytes
            if used > self.capacity:
                return False
            head = (offset + num_bytes) % self.capacity
        return True

    def allocate(self, num_bytes: int) -> int:
        """Offset of a new block; `ArenaFullError` without room (callers reserve first)."""
        assert num_bytes > 0, f"a block of {num_bytes} bytes"
        assert num_bytes % ALIGNMENT == 0, f"a block of {num_bytes} bytes is not a multiple of {ALIGNMENT}"
        pad, offset = self._place(self._head, num_bytes)
        if self.used + pad + num_bytes > self.capacity:
            raise ArenaFullError(
                f"no room for a block of {num_bytes} bytes: {self.used} of {self.capacity} bytes are used in "
                f"{len(self._entries)} entries, head at {self._head}"
            )
        if pad:
            self._entries.append(_Entry(self._head, pad, freed=True))
        entry = _Entry(offset, num_bytes, freed=False)
        self._entries.append(entry)
        self._live[offset] = entry
        self._head = (offset + num_bytes) % self.capacity
        self.used += pad + num_bytes
        return offset

    def free(self, offset: int) -> int:
        """End a block; returns its size. Its bytes come back once all older blocks are freed too."""
        entry = self._live.pop(offset, None)
        assert entry is not None, f"no live block at offset {offset}: freed twice, or never allocated"
        entry.freed = True
        while self._entries and self._entries[0].freed:
            self.used -= self._entries.popleft().num_bytes
        if not self._entries:
            self._head = 0
        return entry.num_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that are allocated and not freed."""
        return len(self._live)

    def _place(self, head: int, num_bytes: int) -> tuple[int, int]:
        """Bytes to skip before a block of this size, and where it then starts; all are skipped where it never fits."""
        pad = 0
        while pad < self.capacity:
            end = min(head - head % self.fence + self.fence, self.capacity)
            if head + num_bytes <= end:
                return pad, head
            pad += end - head
            head = end % self.capacity
        return pad, head

    def assert_invariants(self) -> None:
        offset = self._entries[0].offset if self._entries else 0
        for entry in self._entries:
            assert entry.offset == offset % max(self.capacity, 1), f"entry at {entry.offset}, expected {offset}"
            last = entry.offset + entry.num_bytes - 1
            within = last // self.fence == entry.offset // self.fence and last < self.capacity
            assert within or entry.offset not in self._live, f"block at {entry.offset} straddles an end or a fence"
            offset = (entry.offset + entry.num_bytes) % max(self.capacity, 1)
        assert self._head == offset % max(self.capacity, 1), f"head at {self._head}, expected {offset}"
        assert self.used == sum(entry.num_bytes for entry in self._entries), "used is not the sum of the entries"
        assert 0 <= self.used <= self.capacity, f"{self.used} of {self.capacity} bytes used"
        assert not self._entries or not self._entries[0].freed, "the oldest entry is free and was not reclaimed"
        live = {entry.offset for entry in self._entries if not entry.freed}
        assert live == self._live.keys(), "live blocks and entries differ"
