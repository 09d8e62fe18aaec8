"""Room for producers that may come: the same segment whatever their number is, within the bytes of the pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator import NodeRoom, local_inventory, make_plan
from flowtrain.allocator.spare import with_producers, with_spare
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan
from flowtrain.shapes import read_shape
from flowtrain.types import Role

EXAMPLE = Path(__file__).parents[3] / "examples/emoji/emoji.yaml"


ONE = ModulePlan(Role.CONSUMER, Layout(), (RankPlan(Role.CONSUMER, 0, "cpu", 1),))
"""A consumer that reads in place."""


def config_of(*overrides: str) -> Config:
    return load_config(EXAMPLE, ["cluster.oversubscribe=true", *overrides]).config


@pytest.mark.parametrize(("extra", "most"), [((), 2), (("allocation.max_producers=5",), 5), (("producers.num=2",), 4)])
def test_the_pool_is_divided_for_the_most_there_may_be(extra: tuple[str, ...], most: int) -> None:
    config = config_of("allocation.replan=auto", *extra)
    plan = make_plan(config, read_shape(config.model.path), local_inventory())
    number = len(plan.producers.ranks)
    assert [rank.rank for rank in plan.spare] == list(range(number, most))
    segment = plan.producers.ranks[0].segment_bytes
    assert 0 < most * segment <= config.pool.bytes
    assert plan.pool_bytes == number * segment
    for other in range(1, most + 1):
        grown = with_producers(plan, other)
        assert [rank.rank for rank in grown.producers.ranks] == list(range(other))
        assert {rank.segment_bytes for rank in grown.producers.ranks} == {segment}
        assert grown.producers.layout.world_size == other
        assert with_producers(grown, number) == plan, "those that left may come again"


@pytest.mark.parametrize("overrides", [(), ("allocation.replan=propose",), ("mode=monolithic",)])
def test_nothing_is_spared_where_nobody_comes(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides)
    plan = make_plan(config, read_shape(config.model.path), local_inventory())
    assert not plan.spare
    assert with_producers(plan, 2) == plan


def test_segments_for_copies_stay_in_the_sum() -> None:
    config = config_of()
    plan = make_plan(config, read_shape(config.model.path), local_inventory())
    copying = tuple(replace(rank, segment_bytes=1 << 20, node=1) for rank in plan.consumers.ranks)
    plan = replace(plan, consumers=replace(plan.consumers, ranks=copying))
    spared = with_spare(config_of("allocation.replan=auto"), plan)
    ranks = (*spared.producers.ranks, *spared.consumers.ranks)
    assert spared.pool_bytes == sum(rank.segment_bytes for rank in ranks)


@given(homes=st.lists(st.integers(0, 2), min_size=1, max_size=5), consumers=st.integers(0, 2), more=st.integers(0, 7))
def test_no_node_gives_more_than_its_pool_however_many_come(homes: list[int], consumers: int, more: int) -> None:
    """Producers on several nodes, as many on each as it happens, beside consumers that take copies."""
    config = config_of("allocation.replan=auto", f"allocation.max_producers={len(homes) + more}", "pool.bytes=1GiB")
    reading = Counter([1] * consumers)
    share = {node: config.pool.bytes // (num + reading[node]) // 4096 * 4096 for node, num in Counter(homes).items()}
    producers = [RankPlan(Role.PRODUCER, rank, "cpu", 1, share[node], node) for rank, node in enumerate(homes)]
    copying = [RankPlan(Role.CONSUMER, rank, "cpu", 1, share.get(1, 4096), 1) for rank in range(consumers)]
    sides = [ModulePlan(side[0].role, Layout(), tuple(side)) if side else ONE for side in (producers, copying)]
    spared = with_spare(config, Plan("disaggregated", sides[0], sides[1], 1, 8, 0))
    most = with_producers(spared, len(homes) + more)
    assert len(most.producers.ranks) == len(homes) + more
    held: Counter[int] = Counter()
    for rank in (*most.producers.ranks, *most.consumers.ranks):
        held[rank.node] += rank.segment_bytes
    assert max(held.values()) <= config.pool.bytes
    assert all(held[node] > 0.99 * config.pool.bytes for node in set(homes)), "and it is used"


def apart(*producers: int, threads: int = 2) -> Plan:
    """Producers on these nodes, and a consumer on node 0 that reads all of them by copies."""
    ranks = tuple(RankPlan(Role.PRODUCER, rank, "cpu", threads, 1 << 26, node) for rank, node in enumerate(producers))
    consumer = RankPlan(Role.CONSUMER, 0, "cpu", 4, 1 << 20, 0)
    sides = ModulePlan(Role.PRODUCER, Layout(), ranks), ModulePlan(Role.CONSUMER, Layout(), (consumer,))
    return Plan("disaggregated", *sides, 1, 8, 0)


def test_new_producers_come_where_there_is_room() -> None:
    """Node 0 is full, node 1 has room for two more, node 2 has more than all and no segment that consumers reach."""
    nodes = [NodeRoom("a", 6.0, 0.0), NodeRoom("b", 7.0, 0.0), NodeRoom("c", 64.0, 0.0)]
    config = load_config(EXAMPLE, ["allocation.replan=auto"]).config
    spared = with_spare(config, apart(0, 1), nodes)
    assert [(rank.rank, rank.node) for rank in spared.spare] == [(2, 1), (3, 1)]
    first, second = spared.producers.ranks
    assert first.segment_bytes == 1 << 26, "nobody comes to this node, so nothing is kept for anyone"
    assert {rank.segment_bytes for rank in (second, *spared.spare)} == {(1 << 26) // 3 // 4096 * 4096}


@pytest.mark.parametrize(("most", "room"), [(5, 4), (3, 3)])
def test_what_is_asked_for_has_room_or_is_refused(most: int, room: int) -> None:
    nodes = [NodeRoom("a", 6.0, 0.0), NodeRoom("b", 7.0, 0.0)]
    config = load_config(EXAMPLE, ["allocation.replan=auto", f"allocation.max_producers={most}"]).config
    if most == room:
        assert [rank.node for rank in with_spare(config, apart(0, 1), nodes).spare] == [1]
        return
    with pytest.raises(PlanError, match=r"max_producers is 5 .* room for 4; .* node 1 \(b\) 7 CPUs: lower it"):
        with_spare(config, apart(0, 1), nodes)
    shared = config.model_copy(update={"cluster": config.cluster.model_copy(update={"oversubscribe": True})})
    assert [rank.node for rank in with_spare(shared, apart(0, 1), nodes).spare] == [0, 1, 0]


def test_without_a_number_as_many_may_come_as_have_room() -> None:
    nodes = [NodeRoom("a", 6.0, 0.0), NodeRoom("b", 4.0, 0.0)]
    config = load_config(EXAMPLE, ["allocation.replan=auto"]).config
    assert [rank.node for rank in with_spare(config, apart(0, 1), nodes).spare] == [1]
    assert not with_spare(config, apart(0), nodes).spare


def test_more_producers_than_addresses_tell_apart_are_refused() -> None:
    config = config_of("allocation.replan=auto", "allocation.max_producers=65", "pool.bytes=4GiB")
    with pytest.raises(PlanError, match=r"with 65 producers node 0 .* 64 of a node apart: lower allocation"):
        make_plan(config, read_shape(config.model.path), local_inventory())
