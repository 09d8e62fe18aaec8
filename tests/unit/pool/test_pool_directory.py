"""The directory against owners that run rings of their own: same addresses, every block freed once, nothing left."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import make_address, owner_of
from flowtrain.pool.block import HEADER_BYTES, block_bytes
from flowtrain.pool.directory import Directory
from flowtrain.pool.space import OwnerSpace
from flowtrain.types import Address, EmbeddingRef, Phase, UnitId


def unit_id(number: int, slot: int = 0) -> UnitId:
    return UnitId(Phase.TRAIN, 1, slot, 0, number)


def ref_of(unit: UnitId, address: Address, payload_bytes: int, position: int = 0) -> EmbeddingRef:
    return EmbeddingRef(position, unit, address, payload_bytes, (), (), 0)


def test_bytes_are_charged_on_reserve_and_refunded_on_release() -> None:
    directory = Directory({0: 1000, 3: 1024})
    assert directory.capacity() == 960 + 1024
    assert directory.reserve(3, unit_id(0), [100, 65])
    assert directory.reserved_bytes(3) == block_bytes(100) + block_bytes(65) == 64 + 128 + 64 + 128
    assert directory.reserved_bytes(0) == 0
    assert directory.used_bytes() == 384
    assert not directory.reserve(3, unit_id(1), [640])
    assert directory.used_bytes() == 384, "a refused reservation changes nothing"
    directory.release(unit_id(0))
    assert directory.used_bytes() == 0
    directory.assert_invariants()


def test_a_ring_has_room_again_only_once_its_frees_are_handed_out() -> None:
    directory = Directory({0: 512})
    assert directory.reserve(0, unit_id(0), [256])
    directory.release(unit_id(0))
    assert not directory.room(0, [256])
    assert directory.frees(0) == (make_address(0, HEADER_BYTES),)
    assert directory.frees(0) == ()
    assert directory.room(0, [256])


def test_a_block_goes_through_its_states_in_order() -> None:
    directory = Directory({0: 4096})
    unit = unit_id(0)
    directory.reserve(0, unit, [64])
    ref = ref_of(unit, make_address(0, HEADER_BYTES), 64)
    with pytest.raises(AssertionError, match="is reserved, expected written"):
        directory.lease([ref])
    directory.written([ref])
    with pytest.raises(AssertionError, match="is written, expected reserved"):
        directory.written([ref])
    with pytest.raises(AssertionError, match="is written, expected leased"):
        directory.gradient_written([ref])
    directory.lease([ref])
    directory.gradient_written([ref])
    directory.release(unit)
    with pytest.raises(AssertionError, match="released twice"):
        directory.release(unit)
    with pytest.raises(AssertionError, match="has no block"):
        directory.lease([ref])


def test_features_nobody_has_read_are_not_given_back() -> None:
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64])
    directory.written([ref_of(unit_id(0), make_address(0, HEADER_BYTES), 64)])
    with pytest.raises(AssertionError, match="before anyone has read it"):
        directory.release(unit_id(0))


def test_an_announcement_that_is_not_what_was_reserved_is_refused() -> None:
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64])
    directory.reserve(0, unit_id(1), [64])
    first, second = make_address(0, HEADER_BYTES), make_address(0, HEADER_BYTES + 128, generation=1)
    with pytest.raises(AssertionError, match="has no block"):
        directory.written([ref_of(unit_id(0), make_address(0, 640), 64)])
    with pytest.raises(AssertionError, match="lies in a block of unit"):
        directory.written([ref_of(unit_id(0), second, 64)])
    with pytest.raises(AssertionError, match="has 60 payload bytes, reserved were 64"):
        directory.written([ref_of(unit_id(0), first, 60)])
    with pytest.raises(AssertionError, match="reserved already"):
        directory.reserve(0, unit_id(0), [64])


PAYLOADS = st.lists(st.integers(1, 700), min_size=1, max_size=4)


@given(
    num_owners=st.integers(1, 3),
    capacity=st.integers(40, 120),
    units=st.lists(PAYLOADS, min_size=1, max_size=40),
    bad=st.sets(st.integers(0, 39)),
    dice=st.randoms(),
)
def test_owners_allocate_what_the_directory_foresaw(
    num_owners: int, capacity: int, units: list[list[int]], bad: set[int], dice: random.Random
) -> None:
    """Orders wait in a queue for each owner, answers and releases come at any time and in any order."""
    directory = Directory(dict.fromkeys(range(num_owners), capacity * 64))
    spaces = [OwnerSpace(owner, capacity * 64) for owner in range(num_owners)]
    queues: list[deque[tuple[UnitId, list[int], tuple[Address, ...]]]] = [deque() for _ in range(num_owners)]
    waiting_frees: list[list[Address]] = [[] for _ in range(num_owners)]
    todo, done, released = deque(enumerate(units)), [], 0
    freed: list[Address] = []
    used: set[Address] = set()

    def execute(owner: int) -> None:
        unit, sizes, frees = queues[owner].popleft()
        for address in dice.sample(frees, len(frees)):
            spaces[owner].free(address)
            freed.append(address)
            used.discard(address)
        addresses = [spaces[owner].allocate(n) for n in sizes]
        assert used.isdisjoint(addresses)
        used.update(addresses)
        if unit.number not in bad:
            refs = [ref_of(unit, address, n) for address, n in zip(addresses, sizes, strict=True)]
            directory.written(refs)
            directory.lease(refs)
        done.append(unit)

    while released < len(units):
        for owner in range(num_owners):
            waiting_frees[owner].extend(directory.frees(owner))
        moves = [("execute", owner) for owner in range(num_owners) if queues[owner]]
        moves += [("release", index) for index in range(len(done))]
        moves += [("send", owner) for owner in range(num_owners) if todo and directory.room(owner, todo[0][1])]
        assert moves, "every unit is smaller than a segment, so something can always be done"
        kind, which = dice.choice(moves)
        if kind == "send":
            number, sizes = todo.popleft()
            assert directory.reserve(which, unit_id(number), sizes)
            queues[which].append((unit_id(number), sizes, tuple(waiting_frees[which])))
            waiting_frees[which].clear()
        elif kind == "execute":
            execute(which)
        else:
            directory.release(done.pop(which))
            released += 1
        directory.assert_invariants()
        assert directory.used_bytes() <= directory.capacity()
    assert directory.used_bytes() == 0
    for owner in range(num_owners):
        for address in (*waiting_frees[owner], *directory.frees(owner)):
            assert owner_of(address) == owner
            spaces[owner].free(address)
        assert spaces[owner].arena.used == 0
        assert directory.room(owner, [capacity * 64 - HEADER_BYTES])
    directory.assert_invariants()
