"""Blocks of rows, asked of several readers and handed on in position order whatever order they arrive in.

    want(n) ─▶ requests() ─▶ readers ─▶ add(BlockRead), any order ─▶ take(): rows in position order

A resumed run begins with the positions that were read and not yet trained (`carried`), then goes on at `start`.

Invariants
1. `take` yields carried positions ascending, then `start`, `start + 1`, …, each once, up to `end`.
2. Rows asked for and not yet taken are never more than wanted, rounded up to one block: reading ahead is bounded.
3. Which reader gets which block depends on the order of blocks alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowtrain.data.blocks import BlockRead
from flowtrain.types import SampleMeta, SkippedRow

BLOCK_ROWS = 64
"""Rows of one payload block: large enough to make calls rare, small enough to start early."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Reader `reader` shall read `count` positions from `start`; `block` numbers the requests of a stream from 0."""

    reader: int
    start: int
    count: int
    block: int


class SampleStream:
    """See the module's page. `end`: first position that does not exist (None: epochs without end)."""

    def __init__(
        self,
        num_rows: int,
        block_rows: int,
        num_readers: int,
        start: int = 0,
        carried: Sequence[int] = (),
        end: int | None = None,
    ) -> None:
        assert num_rows > 0, "a stream needs rows"
        assert block_rows > 0, block_rows
        assert num_readers > 0, num_readers
        assert all(position < start for position in carried), f"carried {carried} must lie below the cursor {start}"
        self.num_rows = num_rows
        self._ranges = _ranges(sorted(set(carried)), start, end, block_rows)
        self._num_readers = num_readers
        self._next_block = 0
        self._pending: deque[tuple[int, int]] = deque()
        self._arrived: dict[int, BlockRead] = {}
        self._wanted = 0
        self._asked = 0
        self._drawn: tuple[int, int] | None = None
        self._advance()

    def want(self, more: int) -> None:
        """At least `more` rows beyond those taken so far are needed now."""
        self._wanted = max(self._wanted, more)

    def requests(self) -> list[ReadRequest]:
        """The blocks to ask for now, each told once."""
        told = []
        while self._drawn is not None and self._asked < self._wanted:
            start, count = self._drawn
            told.append(ReadRequest(self._next_block % self._num_readers, start, count, self._next_block))
            self._pending.append((start, count))
            self._asked += count
            self._next_block += 1
            self._advance()
        return told

    def add(self, read: BlockRead) -> None:
        """A block arrived; blocks are known by their first position."""
        expected = dict(self._pending)
        assert read.start in expected, f"rows from position {read.start} were not asked for"
        assert read.start not in self._arrived, f"rows from position {read.start} arrived twice"
        assert len(read.rows) == expected[read.start], f"{len(read.rows)} rows instead of {expected[read.start]}"
        self._arrived[read.start] = read

    def take(self) -> list[SampleMeta | SkippedRow]:
        """The next rows in order, as many as have arrived."""
        rows: list[SampleMeta | SkippedRow] = []
        while self._pending and self._pending[0][0] in self._arrived:
            start, _ = self._pending.popleft()
            rows += self._arrived.pop(start).rows
        self._asked -= len(rows)
        self._wanted = max(0, self._wanted - len(rows))
        return rows

    @property
    def exhausted(self) -> bool:
        """Everything up to `end` was taken."""
        return self._drawn is None and not self._pending

    def _advance(self) -> None:
        self._drawn = next(self._ranges, None)


def _ranges(carried: Sequence[int], start: int, end: int | None, block_rows: int) -> Iterator[tuple[int, int]]:
    """(first position, count) of each block: neighbours among the carried positions share one."""
    first = 0
    while first < len(carried):
        count = 1
        while first + count < len(carried) and count < block_rows and carried[first + count] == carried[first] + count:
            count += 1
        yield carried[first], count
        first += count
    while end is None or start < end:
        count = block_rows if end is None else min(block_rows, end - start)
        yield start, count
        start += count
