"""Placement on nodes and the division of pool bytes: what fits is kept whole, nothing exceeds a node."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from allocator_inputs import config
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator import Inventory, NodeRoom, make_plan, pack_room
from flowtrain.allocator.place import Need, place
from flowtrain.allocator.room import PACKS_HELD, PAGE_BYTES
from flowtrain.allocator.segments import MAX_OWNERS_PER_NODE
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.pool import address
from flowtrain.runtime.flow_producers import DEPTH
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

P, C = Role.PRODUCER, Role.CONSUMER
MANY = Inventory(cpus=64, gpus=0, memory_bytes=2**36, shm_bytes=2**30)


def rooms(*cpus: float) -> list[NodeRoom]:
    return [NodeRoom(f"10.0.0.{number}", amount, 0) for number, amount in enumerate(cpus)]


def needs(consumers: int, producers: int, *, cpus: int = 1, at: tuple[int | None, int | None] = (None, None)):
    return [Need(C, consumers, cpus, 0, at[0]), Need(P, producers, cpus, 0, at[1])]


@pytest.mark.parametrize(
    ("asked", "nodes", "consumers", "producers"),
    [
        pytest.param((2, 2), (4, 4), (0, 0), (0, 0), id="all-on-the-drivers-node"),
        pytest.param((2, 2), (3, 4), (0, 0), (1, 1), id="a-side-each"),
        pytest.param((4, 8), (8, 4), (1, 1, 1, 1), (0,) * 8, id="no-side-is-split-when-another-order-keeps-them-whole"),
        pytest.param((2, 2), (0, 8), (1, 1), (1, 1), id="the-drivers-node-has-nothing"),
        pytest.param((2, 4), (3, 3), (0, 0), (0, 1, 1, 1), id="one-side-is-spread"),
        pytest.param((4, 4), (3, 3, 3), (0, 0, 0, 1), (1, 1, 2, 2), id="both-are-spread"),
    ],
)
def test_where_sides_go(
    asked: tuple[int, int], nodes: tuple[int, ...], consumers: tuple[int, ...], producers: tuple[int, ...]
) -> None:
    assert place(needs(*asked), rooms(*nodes)) == {C: consumers, P: producers}


def test_a_tensor_parallel_group_stays_on_one_node() -> None:
    """Rank by rank the third node would get half of a group."""
    nodes = rooms(3, 3, 2)
    assert place([Need(C, 6, 1, 0, group=2)], nodes) == {C: (0, 0, 1, 1, 2, 2)}
    with pytest.raises(PlanError, match=r"4 consumers with 1 CPUs each, 4 together on a node \(tensor parallel\)"):
        place([Need(C, 4, 1, 0, group=4)], nodes)


def test_a_side_goes_where_the_config_wants_it() -> None:
    assert place(needs(1, 1, at=(0, 1)), rooms(4, 4)) == {C: (0,), P: (1,)}
    assert place(needs(1, 1, at=(1, None)), rooms(4, 4)) == {C: (1,), P: (0,)}
    assert place(needs(1, 2, at=(0, 3)), None) == {C: (0,), P: (3, 3)}
    with pytest.raises(PlanError, match=r"producers.node is 2 and the cluster has 2 nodes"):
        place(needs(1, 1, at=(0, 2)), rooms(4, 4))
    with pytest.raises(
        PlanError, match=r"asked for 5 consumers with 1 CPUs each on node 0; .*node 1 \(10.0.0.1\) 4 CPUs"
    ):
        place(needs(5, 1, at=(0, None)), rooms(4, 4))


def test_gpus_count_like_cores() -> None:
    nodes = [NodeRoom("a", 8, 1), NodeRoom("b", 8, 2)]
    assert place([Need(C, 2, 1, 1), Need(P, 1, 1, 1)], nodes) == {C: (1, 1), P: (0,)}
    with pytest.raises(PlanError, match=r"3 consumers with 1 CPUs and 1 GPUs each.*node 0 \(a\) 8 CPUs and 1 GPUs"):
        place([Need(C, 3, 1, 1), Need(P, 1, 1, 1)], nodes)


def test_a_refusal_of_a_large_cluster_stays_short() -> None:
    with pytest.raises(PlanError, match="and 92 more") as error:
        place(needs(1, 1, cpus=9), rooms(*[1.0] * 100))
    assert len(str(error.value)) < 700


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 2),
)
def test_placements_fit_and_split_only_what_must_be(
    num_consumers: int, num_producers: int, nodes: list[int], cpus: int
) -> None:
    total_fits = sum(room // cpus for room in nodes) >= num_consumers + num_producers
    try:
        homes = place(needs(num_consumers, num_producers, cpus=cpus), rooms(*nodes))
    except PlanError:
        assert not total_fits
        return
    assert [len(homes[C]), len(homes[P])] == [num_consumers, num_producers]
    used = Counter((*homes[C], *homes[P]))
    assert all(num * cpus <= nodes[node] for node, num in used.items())
    whole = {
        (c, p): all(
            (num_consumers * (n == c) + num_producers * (n == p)) * cpus <= room for n, room in enumerate(nodes)
        )
        for c, p in product(range(len(nodes)), repeat=2)
    }
    if any(whole.values()):
        assert len(set(homes[C])) == len(set(homes[P])) == 1
        if whole[0, 0]:
            assert used.keys() == {0}


def joined(emoji: Path, **sections: Any) -> Config:
    """With a cluster, unless the sections say something else of it."""
    return config(emoji, **{"cluster": {"address": "10.0.0.0:6379"}, **sections})


def segments(emoji: Path, shape: ModelShape, nodes: list[NodeRoom] | None, **sections: Any) -> dict[Role, list[int]]:
    plan = make_plan(joined(emoji, **sections), shape, MANY, nodes)
    return {side.role: [rank.segment_bytes for rank in side.ranks] for side in (plan.producers, plan.consumers)}


ONE_THREAD = {"num": 2, "threads": 1}


def test_bytes_are_those_of_a_node(emoji: Path, shape: ModelShape) -> None:
    """On one node nobody copies; apart, the producers have a node's bytes for themselves, and consumers theirs."""
    sides = {"producers": ONE_THREAD, "consumers": ONE_THREAD, "pool": {"bytes": 2**26}}
    assert segments(emoji, shape, rooms(8), **sides) == {P: [2**25, 2**25], C: [0, 0]}
    apart = segments(emoji, shape, rooms(2, 2), **sides)
    assert apart[P] == [2**25, 2**25]
    assert apart[C][0] == apart[C][1] > 0
    assert sum(apart[C]) <= 2**26


@pytest.mark.parametrize(
    ("layout", "nodes", "copying"),
    [
        ("t2", (2, 2), [True, False]),
        ("f2t2", (4, 2), [True, False, True, False]),
        ("t2p2", (4, 2), [True, False, False, False]),
        ("c4", (3, 3), [False, True, False, False]),  # on two nodes: the producers are beside the first one
        ("r2", (2, 2), [True, True]),
    ],
)
def test_neighbours_on_a_node_share_the_copies_of_the_first(
    emoji: Path, shape: ModelShape, layout: str, nodes: tuple[int, ...], copying: list[bool]
) -> None:
    sides = {"producers": ONE_THREAD, "consumers": {"layout": layout, "threads": 1}, "pool": {"bytes": 2**26}}
    plan = make_plan(joined(emoji, **sides), shape, MANY, rooms(*nodes))
    assert [rank.segment_bytes > 0 for rank in plan.consumers.ranks] == copying
    readers = [rank.rank for rank in plan.consumers.ranks if plan.consumers.copier(rank.rank) is not None]
    assert readers == {"t2": [1], "f2t2": [1, 3], "t2p2": [1], "c4": [2, 3], "r2": []}[layout]
    shared = [plan.consumers.shares_copies(rank.rank) for rank in plan.consumers.ranks]
    assert shared == [layout != "r2" and (layout != "t2p2" or rank < 2) for rank in range(len(copying))]


@pytest.mark.parametrize("transport", ["nixl", "ray"])
def test_a_forced_copy_is_charged_to_the_same_node(emoji: Path, shape: ModelShape, transport: str) -> None:
    sides = {"producers": ONE_THREAD, "consumers": ONE_THREAD}
    pool = {"bytes": 2**25, "transport": transport}
    found = segments(emoji, shape, rooms(8), **sides, pool=pool)
    assert all(size and size % PAGE_BYTES == 0 for size in (*found[P], *found[C]))
    assert sum(found[P]) + sum(found[C]) <= 2**25


def test_a_spread_side_copies_only_where_it_must(emoji: Path, shape: ModelShape) -> None:
    """Producers on both nodes: every consumer has one that it cannot reach by shared memory."""
    found = segments(emoji, shape, rooms(3, 3), producers={"num": 4, "threads": 1}, consumers=ONE_THREAD)
    assert all(found[C])
    assert len(set(found[P])) == 2, "the node that also holds consumers has less left"


def test_a_pack_fits_where_it_is_copied_to(emoji: Path, shape: ModelShape) -> None:
    sides = {"producers": {"threads": 1, "node": 1}, "consumers": {"threads": 1, "node": 0}}
    for size in (2**23, 2**25, 2**28):
        given = joined(emoji, **sides, pool={"bytes": size})
        plan = make_plan(given, shape, MANY, rooms(2, 2))
        most = pack_room(given, shape)
        assert PACKS_HELD * most.cap + most.block <= plan.consumers.ranks[0].segment_bytes
        assert most.cap + most.block <= plan.producers.ranks[0].segment_bytes


def test_a_receive_segment_too_small_is_refused_with_both_numbers(emoji: Path, shape: ModelShape) -> None:
    sides = {"producers": {"threads": 1, "node": 1}, "consumers": {"threads": 1, "num": 8, "node": 0}}
    given = joined(emoji, **sides, pool={"bytes": 9 * pack_room(joined(emoji), shape).cap + 2**17})
    with pytest.raises(
        PlanError,
        match=r"\d+ bytes, and 2 packs that it reads from other nodes.* need \d+ bytes: set pool.bytes to \d+",
    ):
        make_plan(given, shape, MANY, rooms(8, 8))


def test_a_pool_above_what_a_node_lends_is_refused(emoji: Path, shape: ModelShape) -> None:
    given = joined(
        emoji, producers={"threads": 1, "node": 1}, consumers={"threads": 1, "node": 0}, pool={"bytes": 2**25}
    )
    lent = [NodeRoom("10.0.0.0", 2, 0, 2**30), NodeRoom("10.0.0.1", 2, 0, 2**24)]
    with pytest.raises(PlanError, match=f"puts {2**25} bytes on node 10.0.0.1, which lends {2**24} bytes"):
        make_plan(given, shape, MANY, lent)


def test_shared_memory_ends_at_the_node(emoji: Path, shape: ModelShape) -> None:
    sides = {"producers": {"threads": 1, "node": 1}, "consumers": {"threads": 1}}
    with pytest.raises(PlanError, match=r"pool.transport is shm and the plan has processes on nodes \[0, 1\]"):
        make_plan(joined(emoji, **sides, pool={"transport": "shm"}), shape, MANY, rooms(2, 2))


def test_a_node_needs_a_cluster(emoji: Path) -> None:
    with pytest.raises(ValueError, match=r"producers.node` is 1 and the run has one node: give `cluster.address`"):
        joined(emoji, producers={"node": 1}, cluster={})
    with pytest.raises(ValueError, match=r"`pool.transport` nixl is for several processes"):
        joined(emoji, mode="monolithic", pool={"transport": "nixl"}, cluster={})


def test_the_figures_of_other_parts_are_the_same() -> None:
    assert PACKS_HELD == DEPTH
    assert MAX_OWNERS_PER_NODE <= address.MAX_OWNERS
