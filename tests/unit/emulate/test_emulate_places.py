"""Where emulated ranks are: each has a thread of its own, and neighbours share a process."""

from __future__ import annotations

from collections import Counter

import pytest

from flowtrain.emulate.executor import Places
from flowtrain.plan import Layout, ModulePlan, Plan
from flowtrain.types import Role


def places(placement: str, producers: int, consumers: int, processes: int = 4) -> Places:
    sides = [
        ModulePlan(role, Layout(dp_replicate=number), ())
        for role, number in ((Role.PRODUCER, producers), (Role.CONSUMER, consumers))
    ]
    found = Places(processes)
    found.take(Plan(placement, *sides, readers=1, cpus=2, pool_bytes=0))
    return found


@pytest.mark.parametrize(("placement", "producers", "consumers"), [("disaggregated", 3, 60), ("disaggregated", 8, 24)])
def test_ranks_of_both_sides_are_spread(placement: str, producers: int, consumers: int) -> None:
    place_of = places(placement, producers, consumers)
    for role, number in ((Role.PRODUCER, producers), (Role.CONSUMER, consumers)):
        found = [place_of((role, rank)) for rank in range(number)]
        assert len(set(found)) == number, "two ranks have one thread"
        assert found == sorted(found), "neighbours are apart"
        ranks = Counter(process for process, _ in found)
        assert len(ranks) == min(4, number)
        assert max(ranks.values()) <= -(-number // 4)
        assert {process[0] for process in ranks} == {role}


def test_producers_that_are_added_have_threads_of_their_own() -> None:
    place_of = places("disaggregated", 5, 8)
    assert len({place_of((Role.PRODUCER, rank)) for rank in range(20)}) == 20


def test_colocated_sides_of_a_rank_take_turns() -> None:
    place_of = places("colocated", 6, 6)
    for rank in range(6):
        assert place_of((Role.PRODUCER, rank)) == place_of((Role.CONSUMER, rank))
    assert len({place_of((Role.CONSUMER, rank)) for rank in range(6)}) == 6
