"""The ring of copies: nothing is written over while it is held, few runs carry many blocks, what is lost stays lost."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import make_address
from flowtrain.pool.arena import ArenaFullError
from flowtrain.pool.block import ALIGNMENT, HEADER_BYTES
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.transport import Span
from flowtrain.pool.transport.inbox import Inbox, Run, by_owner

CAPACITY = 1 << 14
LARGEST = 1 << 10
PACKS_HELD = 2
PACK_BYTES = (CAPACITY - LARGEST) // PACKS_HELD


def spans(*places: tuple[int, int, int]) -> list[Span]:
    """(owner, offset of the block, bytes)."""
    return [Span(make_address(owner, offset + HEADER_BYTES), size) for owner, offset, size in places]


def test_neighbours_at_both_ends_are_one_run() -> None:
    inbox = Inbox(PrivateSegment(0, CAPACITY))
    asked = spans((1, 0, 128), (1, 128, 64), (1, 320, 64), (2, 384, 64), (2, 0, 128))
    inbox.take(asked)
    assert list(inbox.runs(asked)) == [
        Run(1, 0, 0, 192),
        Run(1, 320, 192, 64),
        Run(2, 384, 256, 64),
        Run(2, 0, 320, 128),
    ]
    assert {owner: len(runs) for owner, runs in by_owner(inbox.runs(asked)).items()} == {1: 2, 2: 2}
    assert list(inbox.runs([])) == []


def test_more_than_composition_allows_is_refused_and_takes_nothing() -> None:
    inbox = Inbox(PrivateSegment(0, CAPACITY))
    first = spans((1, 0, CAPACITY // 2))
    inbox.take(first)
    with pytest.raises(
        ArenaFullError, match="no room for copies of 2 blocks of 16384 bytes: 8192 of 16384 bytes hold 1"
    ):
        inbox.take(spans((1, 1 << 20, CAPACITY // 2), (1, 1 << 21, CAPACITY // 2)))
    inbox.give(first)
    inbox.take(spans((1, 1 << 20, CAPACITY // 2), (1, 1 << 21, CAPACITY // 2)))


def test_a_block_is_taken_once() -> None:
    inbox = Inbox(PrivateSegment(0, CAPACITY))
    asked = spans((1, 0, 128))
    inbox.take(asked)
    with pytest.raises(AssertionError, match=r"read again before they were released: .*owner 1 on machine 0"):
        inbox.take(asked)
    inbox.give(asked)
    inbox.take(asked)


def test_what_is_lost_is_never_used_again() -> None:
    inbox = Inbox(PrivateSegment(0, CAPACITY))
    lost, other = spans((1, 0, CAPACITY // 4)), spans((2, 0, CAPACITY // 4))
    (memory,) = inbox.take(lost)
    memory[:] = b"\7" * len(memory)
    inbox.lose(lost)
    inbox.give(lost)
    for _ in range(3):  # once around, up to where the lost bytes lie
        (found,) = inbox.take(other)
        found[:] = b"\1" * len(found)
        inbox.give(other)
    with pytest.raises(ArenaFullError):
        inbox.take(other)
    assert bytes(memory) == b"\7" * len(memory)


@given(
    st.lists(
        st.lists(st.integers(1, LARGEST // ALIGNMENT).map(lambda lines: lines * ALIGNMENT), min_size=1, max_size=12),
        max_size=30,
    ),
    st.integers(1, PACKS_HELD),
)
def test_packs_within_the_bound_always_fit_and_keep_their_bytes(packs: list[list[int]], depth: int) -> None:
    """The bound of `flowtrain.allocator.room`: PACKS_HELD packs of at most PACK_BYTES, blocks of at most LARGEST."""
    inbox = Inbox(PrivateSegment(0, CAPACITY))
    held: deque[tuple[list[Span], list[memoryview]]] = deque()
    offset = 0
    for number, sizes in enumerate(packs):
        places = []
        for size in sizes:
            if sum(place[2] for place in places) + size <= PACK_BYTES:
                places.append((1, offset, size))
                offset += size
        asked = spans(*places)
        memories = inbox.take(asked)
        for memory in memories:
            memory[:] = bytes([number]) * len(memory)
        held.append((asked, memories))
        if len(held) > depth - 1:
            oldest, filled = held.popleft()
            kept = (number - len(held)) % 256
            assert all(set(memory) == {kept} for memory in filled)
            inbox.give(oldest)
