"""The parts of balancing: bounds, moves, and the order of slots against brute force."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.packing.balance import Bounds, Load, improve, johnson, slots_of, spread
from flowtrain.types import SampleMeta

loads_lists = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=20
).map(
    lambda sizes: [
        Load(cost, tokens, num_bytes, SampleMeta(position, position, str(position), tokens, 0, 1))
        for position, (cost, tokens, num_bytes) in enumerate(sizes)
    ]
)
BOUNDS = Bounds(60, 60)


@settings(max_examples=100, deadline=None)
@given(loads_lists, st.integers(1, 6))
def test_improve_keeps_rows_and_bounds_and_never_worsens(loads: list[Load], num_packs: int) -> None:
    bins = spread(loads, num_packs, BOUNDS)
    if bins is None:
        return
    dearest = max(pack.cost for pack in bins)
    improve(bins, BOUNDS)
    assert max(pack.cost for pack in bins) <= dearest
    assert sorted(load.sample.position for pack in bins for load in pack.loads) == list(range(len(loads)))
    for pack in bins:
        assert pack.tokens == sum(load.tokens for load in pack.loads) <= BOUNDS.tokens
        assert pack.vision_bytes == sum(load.vision_bytes for load in pack.loads) <= BOUNDS.vision_bytes


@settings(max_examples=100, deadline=None)
@given(loads_lists)
def test_one_pack_a_row_always_fits(loads: list[Load]) -> None:
    assert spread(loads, len(loads), BOUNDS) is not None


def test_improve_finds_the_swap() -> None:
    costs = [5, 5, 4, 4, 3, 3]
    loads = [Load(cost, 10, 0, SampleMeta(n, n, str(n), 10, 0, 1)) for n, cost in enumerate(costs)]
    bins = spread(loads, 2, Bounds(30, 0))
    assert bins is not None
    improve(bins, Bounds(30, 0))
    assert [pack.cost for pack in bins] == [12, 12]


@settings(max_examples=100, deadline=None)
@given(loads_lists)
def test_slots_hold_neighbours_in_cost(loads: list[Load]) -> None:
    bins = spread(loads, 2 * len(loads), BOUNDS)
    assert bins is not None
    slots = slots_of(bins, 2)
    for before, after in pairwise(slots):
        assert min(pack.cost for pack in before) >= max(pack.cost for pack in after)


def makespan(stages: list[tuple[float, float]], order: list[int]) -> float:
    first = second = 0.0
    for number in order:
        first += stages[number][0]
        second = max(first, second) + stages[number][1]
    return second


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_johnson_is_the_best_order(sizes: list[tuple[int, int]]) -> None:
    stages = [(float(a), float(b)) for a, b in sizes]
    order = johnson(stages)
    assert sorted(order) == list(range(len(stages)))
    assert makespan(stages, order) == min(makespan(stages, list(p)) for p in permutations(range(len(stages))))
