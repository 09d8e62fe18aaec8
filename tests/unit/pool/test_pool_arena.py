"""The ring: no overlap, exact room, the bound under which a slot always fits, and equality of two rings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.arena import ArenaFullError, RingArena
from flowtrain.pool.block import ALIGNMENT

LINES = st.integers(1, 12)
"""Sizes in cache lines."""


def test_blocks_follow_each_other_and_the_capacity_is_whole_lines() -> None:
    ring = RingArena(4 * ALIGNMENT + 63)
    assert ring.capacity == 4 * ALIGNMENT
    assert [ring.allocate(ALIGNMENT) for _ in range(4)] == [0, 64, 128, 192]
    with pytest.raises(ArenaFullError, match="256 of 256 bytes"):
        ring.allocate(ALIGNMENT)


def test_bytes_come_back_from_the_tail_only() -> None:
    ring = RingArena(4 * ALIGNMENT)
    offsets = [ring.allocate(ALIGNMENT) for _ in range(4)]
    ring.free(offsets[1])
    assert not ring.room([ALIGNMENT])
    ring.free(offsets[0])
    assert ring.room([ALIGNMENT, ALIGNMENT])
    assert not ring.room([ALIGNMENT] * 3)
    assert ring.allocate(2 * ALIGNMENT) == 0


def test_a_block_never_straddles_the_end_and_the_pad_is_charged() -> None:
    ring = RingArena(10 * ALIGNMENT)
    first, second = ring.allocate(4 * ALIGNMENT), ring.allocate(4 * ALIGNMENT)
    ring.free(first)
    assert ring.allocate(3 * ALIGNMENT) == 0, "two lines are left at the end, three at the front"
    assert ring.used == (4 + 2 + 3) * ALIGNMENT
    ring.assert_invariants()
    ring.free(second)
    assert ring.used == 3 * ALIGNMENT, "the pad goes with the block before it"


def test_an_empty_ring_starts_again_at_zero() -> None:
    ring = RingArena(10 * ALIGNMENT)
    for _ in range(5):
        assert ring.allocate(9 * ALIGNMENT) == 0
        ring.free(0)


def test_a_double_free_is_refused() -> None:
    ring = RingArena(10 * ALIGNMENT)
    ring.free(ring.allocate(ALIGNMENT))
    with pytest.raises(AssertionError, match="freed twice"):
        ring.free(0)


@pytest.mark.parametrize("num_bytes", [0, -64, 63])
def test_sizes_are_whole_lines(num_bytes: int) -> None:
    with pytest.raises(AssertionError, match=f"a block of {num_bytes} bytes"):
        RingArena(1024).allocate(num_bytes)


@given(capacity=st.integers(12, 60), moves=st.lists(st.tuples(LINES, st.integers(0, 3), st.randoms()), max_size=60))
def test_live_blocks_are_apart_and_room_tells_the_truth(
    capacity: int, moves: list[tuple[int, int, random.Random]]
) -> None:
    ring = RingArena(capacity * ALIGNMENT)
    live: dict[int, int] = {}
    for lines, num_frees, dice in moves:
        for offset in dice.sample(sorted(live), min(num_frees, len(live))):
            assert ring.free(offset) == live.pop(offset)
            ring.assert_invariants()
        size = lines * ALIGNMENT
        if ring.room([size]):
            offset = ring.allocate(size)
            assert 0 <= offset <= ring.capacity - size
            assert all(offset + size <= start or start + length <= offset for start, length in live.items())
            live[offset] = size
        else:
            with pytest.raises(ArenaFullError):
                ring.allocate(size)
        ring.assert_invariants()
        assert ring.num_blocks == len(live)
        assert sum(live.values()) <= ring.used <= ring.capacity
    for offset in list(live):
        ring.free(offset)
    assert ring.used == 0
    assert ring.room([ring.capacity])


@given(
    capacity=st.integers(12, 60),
    before=st.lists(LINES, max_size=20),
    sizes=st.lists(LINES, max_size=8),
    num_freed=st.integers(0, 20),
)
def test_room_for_several_is_room_one_after_the_other(
    capacity: int, before: list[int], sizes: list[int], num_freed: int
) -> None:
    ring = RingArena(capacity * ALIGNMENT)
    offsets = [ring.allocate(lines * ALIGNMENT) for lines in before if ring.room([lines * ALIGNMENT])]
    for offset in offsets[:num_freed]:
        ring.free(offset)
    told = ring.room([lines * ALIGNMENT for lines in sizes])
    done = True
    for lines in sizes:
        if not ring.room([lines * ALIGNMENT]):
            done = False
            break
        ring.allocate(lines * ALIGNMENT)
    assert told == done


@given(slots=st.lists(st.lists(LINES, min_size=1, max_size=6), min_size=1, max_size=30), slack=st.integers(0, 8))
def test_slots_within_the_bound_always_go_on(slots: list[list[int]], slack: int) -> None:
    """A slot is freed only as a whole and only once all of it is there: the hardest order of need. With
    largest slot + largest block ≤ capacity it never stops."""
    largest = max(sum(slot) for slot in slots) + max(max(slot) for slot in slots)
    ring = RingArena((largest + slack) * ALIGNMENT)
    todo = [(index, lines) for index, slot in enumerate(slots) for lines in slot]
    held: dict[int, list[int]] = {}
    for oldest in range(len(slots)):
        while todo and ring.room([todo[0][1] * ALIGNMENT]):
            index, lines = todo.pop(0)
            held.setdefault(index, []).append(ring.allocate(lines * ALIGNMENT))
        assert len(held[oldest]) == len(slots[oldest]), "the oldest slot could not be completed"
        for offset in held.pop(oldest):
            ring.free(offset)
        ring.assert_invariants()
    assert ring.used == 0


@given(
    capacity=st.integers(12, 60), moves=st.lists(st.tuples(LINES, st.integers(0, 4)), max_size=60), dice=st.randoms()
)
def test_two_rings_agree_whenever_and_in_whichever_order_frees_arrive(
    capacity: int, moves: list[tuple[int, int]], dice: random.Random
) -> None:
    """One ring frees at once, the other keeps its frees until it allocates next and applies them shuffled."""
    first, second = RingArena(capacity * ALIGNMENT), RingArena(capacity * ALIGNMENT)
    live: list[int] = []
    kept: list[int] = []
    for lines, num_frees in moves:
        for _ in range(min(num_frees, len(live))):
            offset = live.pop(dice.randrange(len(live)))
            first.free(offset)
            kept.append(offset)
        if first.room([lines * ALIGNMENT]):
            dice.shuffle(kept)
            for offset in kept:
                second.free(offset)
            kept.clear()
            offset = first.allocate(lines * ALIGNMENT)
            assert second.allocate(lines * ALIGNMENT) == offset
            assert first.used == second.used
            live.append(offset)


@given(
    slots=st.lists(st.lists(LINES, min_size=1, max_size=6), min_size=1, max_size=30),
    num_fences=st.integers(1, 4),
    slack=st.integers(0, 8),
)
def test_fences_cost_one_largest_block_each(slots: list[list[int]], num_fences: int, slack: int) -> None:
    """The bound with fences, under the hardest order of need: largest slot + fences · largest block ≤ capacity."""
    largest = max(max(slot) for slot in slots)
    capacity = max(sum(slot) for slot in slots) + num_fences * largest + slack
    fence = max(-(-capacity // num_fences), largest)
    ring = RingArena(capacity * ALIGNMENT, fence * ALIGNMENT)
    todo = [(index, lines) for index, slot in enumerate(slots) for lines in slot]
    held: dict[int, list[int]] = {}
    for oldest in range(len(slots)):
        while todo and ring.room([todo[0][1] * ALIGNMENT]):
            index, lines = todo.pop(0)
            offset = ring.allocate(lines * ALIGNMENT)
            assert offset // ring.fence == (offset + lines * ALIGNMENT - 1) // ring.fence
            held.setdefault(index, []).append(offset)
            ring.assert_invariants()
        assert len(held[oldest]) == len(slots[oldest]), "the oldest slot could not be completed"
        for offset in held.pop(oldest):
            ring.free(offset)
        ring.assert_invariants()


def test_a_block_starts_behind_the_fence_that_it_would_lie_across() -> None:
    ring = RingArena(10 * ALIGNMENT, 4 * ALIGNMENT)
    offsets = [ring.allocate(3 * ALIGNMENT) for _ in range(2)]
    assert offsets == [0, 4 * ALIGNMENT]
    assert ring.allocate(2 * ALIGNMENT) == 8 * ALIGNMENT
    assert not ring.room([ALIGNMENT]), "the pads before the fences are charged"
    with pytest.raises(AssertionError, match="not at a multiple of 64"):
        RingArena(1024, 100)
