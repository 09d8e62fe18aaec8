"""Addresses of an owner: each allocation a new one, and a release told from a use after it."""

from __future__ import annotations

import pytest

from flowtrain.pool.address import NUM_GENERATIONS, Region, generation_of, make_owner, offset_of, owner_of, region_of
from flowtrain.pool.space import OwnerSpace


def test_a_place_used_again_has_another_address() -> None:
    owner = make_owner(3, 2)
    space = OwnerSpace(owner, 4096, Region.DEVICE)
    seen = []
    for _ in range(NUM_GENERATIONS + 1):
        address = space.allocate(64)
        assert (owner_of(address), region_of(address), offset_of(address)) == (owner, Region.DEVICE, 64)
        space.free(address)
        space.assert_invariants()
        seen.append(address)
    assert len(set(seen)) == NUM_GENERATIONS
    assert seen[-1] == seen[0], "generations repeat after as many allocations"
    assert [generation_of(address) for address in seen[:3]] == [0, 1, 2]


def test_an_earlier_block_of_the_same_place_is_not_freed() -> None:
    space = OwnerSpace(0, 4096)
    first = space.allocate(64)
    space.free(first)
    with pytest.raises(AssertionError, match="freed twice, or never allocated"):
        space.free(first)
    second = space.allocate(64)
    with pytest.raises(AssertionError, match=r"generation 0 is told to be freed, and its place is now .*generation 1"):
        space.free(first)
    assert space.live == {second}


def test_a_foreign_block_is_not_freed() -> None:
    other = OwnerSpace(1, 4096).allocate(64)
    with pytest.raises(AssertionError, match="owner 0 is told to free"):
        OwnerSpace(0, 4096).free(other)
