"""Ways to place blocks in a segment, to compare with the pool's ring.

| arena | a block goes | state depends on |
|---|---|---|
| `ring` | behind the one before it; comes back from the oldest end | order of allocations, set of frees |
| `first` | into the lowest hole that holds it | live blocks only |
| `best` | into the smallest hole that holds it, the lowest of equals | live blocks only |
| `good` | into a hole of a size class in which all hold it (two levels of classes, as in TLSF) | live blocks only |

Holes are merged with their neighbours at once. Sizes and capacities are multiples of 64 bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from flowtrain.pool.arena import RingArena

LINE = 64


class Arena(Protocol):
    def allocate(self, num_bytes: int) -> int | None: ...

    def free(self, offset: int) -> None: ...


class Ring:
    """The pool's own arena."""

    def __init__(self, capacity: int) -> None:
        self._ring = RingArena(capacity)

    def allocate(self, num_bytes: int) -> int | None:
        return self._ring.allocate(num_bytes) if self._ring.room((num_bytes,)) else None

    def free(self, offset: int) -> None:
        self._ring.free(offset)


class Holes:
    """Free ranges by where they start and end; a subclass keeps them in the order in which it searches."""

    def __init__(self, capacity: int) -> None:
        self._sizes: dict[int, int] = {}
        self._starts_by_end: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._put(0, capacity - capacity % LINE)

    def allocate(self, num_bytes: int) -> int | None:
        offset = self._find(num_bytes)
        if offset is None:
            return None
        size = self._take(offset)
        if size > num_bytes:
            self._put(offset + num_bytes, size - num_bytes)
        self._live[offset] = num_bytes
        return offset

    def free(self, offset: int) -> None:
        size = self._live.pop(offset)
        before = self._starts_by_end.get(offset)
        if offset + size in self._sizes:
            size += self._take(offset + size)
        if before is not None:
            size += self._take(before)
            offset = before
        self._put(offset, size)

    def _put(self, offset: int, size: int) -> None:
        self._sizes[offset] = size
        self._starts_by_end[offset + size] = offset
        self._index(offset, size)

    def _take(self, offset: int) -> int:
        size = self._sizes.pop(offset)
        del self._starts_by_end[offset + size]
        self._unindex(offset, size)
        return size

    def _find(self, num_bytes: int) -> int | None:
        raise NotImplementedError

    def _index(self, offset: int, size: int) -> None:
        raise NotImplementedError

    def _unindex(self, offset: int, size: int) -> None:
        raise NotImplementedError


class FirstFit(Holes):
    def __init__(self, capacity: int) -> None:
        self._offsets: list[int] = []
        super().__init__(capacity)

    def _find(self, num_bytes: int) -> int | None:
        return next((offset for offset in self._offsets if self._sizes[offset] >= num_bytes), None)

    def _index(self, offset: int, size: int) -> None:
        insort(self._offsets, offset)

    def _unindex(self, offset: int, size: int) -> None:
        del self._offsets[bisect_left(self._offsets, offset)]


class BestFit(Holes):
    def __init__(self, capacity: int) -> None:
        self._ordered: list[tuple[int, int]] = []
        super().__init__(capacity)

    def _find(self, num_bytes: int) -> int | None:
        at = bisect_left(self._ordered, (num_bytes, 0))
        return self._ordered[at][1] if at < len(self._ordered) else None

    def _index(self, offset: int, size: int) -> None:
        insort(self._ordered, (size, offset))

    def _unindex(self, offset: int, size: int) -> None:
        del self._ordered[bisect_left(self._ordered, (size, offset))]


class GoodFit(Holes):
    """Classes: the highest set bit of the size in lines, then equal parts. A mask has a bit for each that is not empty,
    so a search is one shift and one count of zeros; within a class the lowest hole is taken."""

    SPLIT_BITS = 4

    def __init__(self, capacity: int) -> None:
        self._mask = 0
        self._classes: dict[int, list[int]] = {}
        super().__init__(capacity)

    def _class(self, size: int) -> int:
        lines = size // LINE
        top = lines.bit_length() - 1
        if top <= self.SPLIT_BITS:
            return lines
        return (top << self.SPLIT_BITS) + ((lines >> (top - self.SPLIT_BITS)) & ((1 << self.SPLIT_BITS) - 1))

    def _find(self, num_bytes: int) -> int | None:
        wanted = self._class(num_bytes)
        for offset in self._classes.get(wanted, ())[:1]:
            if self._sizes[offset] >= num_bytes:
                return offset
        above = self._mask >> (wanted + 1)
        if not above:
            return None
        return self._classes[wanted + (above & -above).bit_length()][0]

    def _index(self, offset: int, size: int) -> None:
        of = self._class(size)
        insort(self._classes.setdefault(of, []), offset)
        self._mask |= 1 << of

    def _unindex(self, offset: int, size: int) -> None:
        of = self._class(size)
        holes = self._classes[of]
        del holes[bisect_left(holes, offset)]
        if not holes:
            self._mask &= ~(1 << of)


ARENAS: dict[str, Callable[[int], Arena]] = {"ring": Ring, "best": BestFit, "first": FirstFit, "good": GoodFit}
