"""The ring of a segment: blocks are allocated in order, freed in any order, and reclaimed from the tail (contract C6).

    0            tail                                     head        capacity
    ┌────────────┬─────────┬─────────┬─────────┬──────────┬───────────┐
    │    room    │ live    │ freed   │ live    │ live     │   room    │
    └────────────┴─────────┴─────────┴─────────┴──────────┴───────────┘
                 ▲ reclaimed next, once freed             ▲ allocated next

1. `allocate` puts a block at the head. One that would straddle the end starts at 0 instead, and the bytes left over
   at the end become a *pad*: charged like a block, free from the start, reclaimed with the blocks before it.
2. `free` marks a block, then reclaims from the tail as long as the oldest entry is free.
3. A ring that has become empty starts again at 0.

Invariants: entries lie one after the other from tail to head; `used` is their sum and never above `capacity`; the
oldest entry is live. The state before an allocation depends only on which blocks were allocated, in
which order, and which of them are freed, not on when or in which order they were freed: so two rings that see the
same allocations and have seen the same frees by each of them hand out the same offsets.

Bound: blocks of at most B bytes each, S bytes in all, fit into a ring that holds nothing else when S + B ≤ capacity,
wherever its head stands, since a pad is smaller than the block that did not fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from flowtrain.pool.block import ALIGNMENT


class ArenaFullError(AssertionError):
    """An allocation that was not reserved: the two rings of an owner have come apart."""


@dataclass(slots=True)
class _Entry:
    offset: int
    num_bytes: int
    freed: bool


class RingArena:
    """See the module's page. `capacity` in bytes, rounded down to whole cache lines.

    >>> ring = RingArena(256)
    >>> ring.allocate(128), ring.allocate(64)
    (0, 128)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.used = 0
        self._head = 0
        self._entries: deque[_Entry] = deque()
        self._live: dict[int, _Entry] = {}

    def room(self, sizes: Iterable[int]) -> bool:
        """Whether blocks of these sizes can be allocated now, one after the other."""
        head, used = self._head, self.used
        for num_bytes in sizes:
            pad = self._pad(head, num_bytes)
            used += pad + num_bytes
            if used > self.capacity:
                return False
            head = (num_bytes if pad else head + num_bytes) % max(self.capacity, 1)
        return True

    def allocate(self, num_bytes: int) -> int:
        """Offset of a new block; `ArenaFullError` without room (callers reserve first)."""
        assert num_bytes > 0, f"a block of {num_bytes} bytes"
        assert num_bytes % ALIGNMENT == 0, f"a block of {num_bytes} bytes is not a multiple of {ALIGNMENT}"
        pad = self._pad(self._head, num_bytes)
        if self.used + pad + num_bytes > self.capacity:
            raise ArenaFullError(
                f"no room for a block of {num_bytes} bytes: {self.used} of {self.capacity} bytes are used in "
                f"{len(self._entries)} entries, head at {self._head}"
            )
        if pad:
            self._entries.append(_Entry(self._head, pad, freed=True))
            self._head = 0
        entry = _Entry(self._head, num_bytes, freed=False)
        self._entries.append(entry)
        self._live[entry.offset] = entry
        self._head = (self._head + num_bytes) % self.capacity
        self.used += pad + num_bytes
        return entry.offset

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

    def _pad(self, head: int, num_bytes: int) -> int:
        """Bytes to skip at the end of the segment before a block of this size."""
        return self.capacity - head if head and head + num_bytes > self.capacity else 0

    def assert_invariants(self) -> None:
        offset = self._entries[0].offset if self._entries else 0
        for entry in self._entries:
            assert entry.offset == offset % max(self.capacity, 1), f"entry at {entry.offset}, expected {offset}"
            assert entry.offset + entry.num_bytes <= self.capacity, f"block at {entry.offset} straddles the end"
            offset = entry.offset + entry.num_bytes
        assert self._head == offset % max(self.capacity, 1), f"head at {self._head}, expected {offset}"
        assert self.used == sum(entry.num_bytes for entry in self._entries), "used is not the sum of the entries"
        assert 0 <= self.used <= self.capacity, f"{self.used} of {self.capacity} bytes used"
        assert not self._entries or not self._entries[0].freed, "the oldest entry is free and was not reclaimed"
        live = {entry.offset for entry in self._entries if not entry.freed}
        assert live == self._live.keys(), "live blocks and entries differ"
