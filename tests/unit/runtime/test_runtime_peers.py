"""Orders to a data-parallel rank reach all its ranks; it has answered when the slowest of them has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.messages import PackTrained, PoolUse
from flowtrain.plan import layout_of
from flowtrain.runtime.peers import Peers
from flowtrain.types import Phase, Role


def test_an_order_goes_to_all_ranks_of_a_data_parallel_rank() -> None:
    peers = Peers({Role.PRODUCER: layout_of("r2"), Role.CONSUMER: layout_of("f2t2")})
    assert [peers.ranks(Role.CONSUMER, dp) for dp in (0, 1)] == [(0, 1), (2, 3)]
    assert [peers.ranks(Role.PRODUCER, rank) for rank in (0, 5)] == [(0,), (5,)]


@given(st.permutations([rank for rank in range(4) for _ in range(3)]))
def test_answers_are_told_once_the_last_peer_has_answered(order: list[int]) -> None:
    """Three packs on each rank of f2t2, answers in any interleaving: the first peer's n-th with the last n-th."""
    peers = Peers({Role.CONSUMER: layout_of("f2t2")})
    given_so_far, told = [0] * 4, [0, 0]
    for rank in order:
        values = peers.answered(Role.CONSUMER, rank, "encode", (rank, given_so_far[rank]))
        given_so_far[rank] += 1
        dp = rank // 2
        assert values == ((2 * dp, told[dp]),)[: min(given_so_far[2 * dp : 2 * dp + 2]) - told[dp]]
        told[dp] += len(values)
    assert told == [3, 3]


def pack(rank: int, slot: int, loss_sum: float, seconds: float) -> PackTrained:
    return PackTrained(Phase.TRAIN, 1, slot, rank, loss_sum, 5, seconds, 0.0)


def test_packs_of_a_pipeline_are_told_when_all_its_ranks_are_done_with_them() -> None:
    """The last rank knows the loss and is done first, the slowest says how long a pack takes."""
    peers = Peers({Role.CONSUMER: layout_of("p2")})
    first, last = [pack(0, slot, 0.0, 3.0) for slot in (0, 1)], [pack(0, slot, 7.0 + slot, 4.0) for slot in (0, 1)]
    answers = [(1, (last[0],)), (0, ()), (1, (last[1],)), (0, (first[0], first[1]))]
    told = [peers.answered(Role.CONSUMER, rank, "train", value) for rank, value in answers]
    assert told == [(), (), (), tuple(last)]


def test_what_the_ranks_have_read_is_added_up() -> None:
    peers = Peers({Role.CONSUMER: layout_of("t2")})
    uses = PoolUse(0.5, {"nixl": 8}, {"nixl": 64, "shm": 32}, 7), PoolUse(0.25, {}, {"copies": 64, "shm": 32}, 7)
    answers = [replace(pack(rank, 0, 1.0, 1.0), pool=use) for rank, use in enumerate(uses)]
    assert peers.answered(Role.CONSUMER, 1, "train", (answers[1],)) == ()
    (told,) = peers.answered(Role.CONSUMER, 0, "train", (answers[0],))
    assert told.pool == PoolUse(0.5, {"nixl": 8}, {"nixl": 64, "shm": 64, "copies": 64}, 7)


def test_what_every_rank_does_for_itself_is_told_as_it_comes() -> None:
    peers = Peers({Role.CONSUMER: layout_of("t2")})
    assert peers.answered(Role.CONSUMER, 1, "reduce", "mine") == ("mine",)
    assert peers.answered(Role.READER, 1, "read", "rows") == ("rows",)
