"""The directory against owners that run rings of their own: same addresses, every block freed once, nothing left."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import make_address, owner_of
from flowtrain.pool.block import HEADER_BYTES, block_bytes
from flowtrain.pool.directory import Directory
from flowtrain.pool.lease import LEGAL, Event, Holder, IllegalTransition, Lease
from flowtrain.pool.space import OwnerSpace
from flowtrain.types import Address, EmbeddingRef, Phase, Role, UnitId

A: Holder = (Role.CONSUMER, 0)
B: Holder = (Role.CONSUMER, 1)
NOBODY: Holder = (Role.CONSUMER, 9)


def unit_id(number: int, slot: int = 0) -> UnitId:
    return UnitId(Phase.TRAIN, 1, slot, 0, number)


def ref_of(unit: UnitId, address: Address, payload_bytes: int, position: int = 0) -> EmbeddingRef:
    return EmbeddingRef(position, unit, address, payload_bytes, (), (), 0)


def test_bytes_are_charged_on_reserve_and_refunded_on_release() -> None:
    directory = Directory({0: 1000, 3: 1024})
    assert directory.capacity() == 960 + 1024
    assert directory.reserve(3, unit_id(0), [100, 65])
    assert directory.used_bytes() == block_bytes(100) + block_bytes(65) == 64 + 128 + 64 + 128
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


def one_block(state: Lease) -> tuple[Directory, EmbeddingRef]:
    """A directory with one block in this state, which is not `RELEASED`."""
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64])
    ref = ref_of(unit_id(0), make_address(0, HEADER_BYTES), 64)
    if state is Lease.RESERVED:
        return directory, ref
    directory.written([ref])
    if state is not Lease.WRITTEN:
        directory.lease([ref], A, gradient=state is not Lease.LEASED)
    if state is Lease.GRADIENT:
        directory.gradient_written([ref], A)
    if state is Lease.LOST:
        directory.expire(A)
    return directory, ref


def state_of(directory: Directory, ref: EmbeddingRef) -> Lease:
    """What the directory says when it refuses a gradient of somebody who holds no lease, which it does in any state."""
    with pytest.raises(IllegalTransition) as caught:
        directory.gradient_written([ref], NOBODY)
    told = re.search(r"\) is ([a-z ]+) and cannot have a gradient", str(caught.value))
    return Lease(told[1]) if told else Lease.PENDING


EVENTS: dict[Event, Callable[[Directory, EmbeddingRef], object]] = {
    Event.WRITE: lambda directory, ref: directory.written([ref]),
    Event.LEASE: lambda directory, ref: directory.lease([ref], B),
    Event.LEASE_FOR_GRADIENT: lambda directory, ref: directory.lease([ref], B, gradient=True),
    Event.WRITE_GRADIENT: lambda directory, ref: directory.gradient_written([ref], A),
    Event.RELEASE: lambda directory, ref: directory.release(ref.unit),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", [state for state in Lease if state is not Lease.RELEASED])
def test_every_event_in_every_state_is_legal_or_told_with_the_story(state: Lease, event: Event) -> None:
    directory, ref = one_block(state)
    assert state_of(directory, ref) is state
    before, after = LEGAL[event]
    if state in before:
        EVENTS[event](directory, ref)
        if after is not Lease.RELEASED:
            assert state_of(directory, ref) is after
    else:
        told = f"is {state.value} and cannot {event.value}.*story by number of event: 1: reserved for unit 0 of train"
        with pytest.raises(IllegalTransition, match=told):
            EVENTS[event](directory, ref)
        assert state_of(directory, ref) is state
    directory.assert_invariants()


@pytest.mark.parametrize("event", EVENTS)
def test_a_released_block_is_told_with_its_whole_story(event: Event) -> None:
    directory, ref = one_block(Lease.GRADIENT)
    directory.release(ref.unit)
    if event is Event.RELEASE:
        with pytest.raises(AssertionError, match="released twice"):
            EVENTS[event](directory, ref)
        return
    with pytest.raises(IllegalTransition) as caught:
        EVENTS[event](directory, ref)
    for part in ("was released", "1: reserved", "2: written", "3: leased by consumer 0 for a gradient", "5: released"):
        assert part in str(caught.value)
    assert len(caught.value.story) == 5


def test_leases_of_a_dead_process_expire_and_those_of_others_stay() -> None:
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64, 64, 64])
    refs = [ref_of(unit_id(0), make_address(0, HEADER_BYTES + 128 * i, i), 64, i) for i in range(3)]
    directory.written(refs)
    directory.lease(refs[:2], A)
    directory.lease(refs[1:2], B)
    directory.lease(refs[2:], A, gradient=True)
    for holder in (A, B):
        with pytest.raises(IllegalTransition, match=f"leased by consumer {holder[1]} already"):
            directory.lease(refs[1:2], holder)
    assert directory.expire(A) == ((refs[0].address,), (refs[2].address,))
    states = [state_of(directory, ref) for ref in refs]
    assert states == [Lease.WRITTEN, Lease.LEASED, Lease.LOST]
    assert directory.expire(A) == ((), ())
    directory.assert_invariants()
    with pytest.raises(IllegalTransition, match="is lost and cannot have a gradient"):
        directory.gradient_written(refs[2:], A)
    directory.lease(refs[:1], B)
    directory.release(unit_id(0))
    assert directory.used_bytes() == 0
    directory.assert_invariants()


def test_a_gradient_comes_from_the_one_who_holds_the_lease() -> None:
    directory, ref = one_block(Lease.PENDING)
    with pytest.raises(IllegalTransition, match="gradient from consumer 1, who holds no lease"):
        directory.gradient_written([ref], B)


def test_a_refused_release_releases_none_of_the_unit() -> None:
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64, 64])
    directory.written([ref_of(unit_id(0), make_address(0, HEADER_BYTES + 128, 1), 64)])
    with pytest.raises(IllegalTransition, match="is written and cannot be released"):
        directory.release(unit_id(0))
    assert directory.used_bytes() == 256
    directory.assert_invariants()


def test_an_announcement_that_is_not_what_was_reserved_is_refused() -> None:
    directory = Directory({0: 4096})
    directory.reserve(0, unit_id(0), [64])
    directory.reserve(0, unit_id(1), [64])
    first, second = make_address(0, HEADER_BYTES), make_address(0, HEADER_BYTES + 128, generation=1)
    with pytest.raises(IllegalTransition, match="was never reserved"):
        directory.written([ref_of(unit_id(0), make_address(0, 640), 64)])
    with pytest.raises(IllegalTransition, match="lies in a block of unit"):
        directory.written([ref_of(unit_id(0), second, 64)])
    with pytest.raises(IllegalTransition, match="has 60 payload bytes, reserved were 64"):
        directory.written([ref_of(unit_id(0), first, 60)])
    with pytest.raises(AssertionError, match="reserved already"):
        directory.reserve(0, unit_id(0), [64])


def test_the_journal_has_every_event_in_order() -> None:
    seen: list[tuple[str, Address, int]] = []
    directory = Directory({0: 4096}, journal=lambda *event: seen.append(event))
    directory.reserve(0, unit_id(0), [100])
    directory.release(unit_id(0))
    (address,) = directory.frees(0)
    assert seen == [("reserve", address, 192), ("release", address, 192), ("free", address, 0)]


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
            directory.lease(refs, A)
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
