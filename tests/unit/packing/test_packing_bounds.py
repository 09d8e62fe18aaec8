"""Lower bounds never lie above the best of all packings, and often meet it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.packing.bounds import dearest_pack, fewest_packs, lock_step, reachable
from flowtrain.packing.measure import imbalances

cost_lists = st.lists(st.integers(1, 30), min_size=1, max_size=7)


def all_packings(numbers: list[int], num_packs: int) -> list[list[int]]:
    """Sums of every way to spread the numbers over the packs."""
    found = []
    for choice in product(range(num_packs), repeat=len(numbers)):
        sums = [0] * num_packs
        for number, pack in zip(numbers, choice, strict=True):
            sums[pack] += number
        found.append(sums)
    return found


@settings(max_examples=60, deadline=None)
@given(cost_lists, st.integers(1, 3))
def test_dearest_pack(costs: list[int], num_packs: int) -> None:
    best = min(max(sums) for sums in all_packings(costs, num_packs))
    assert dearest_pack(costs, num_packs) <= best


@settings(max_examples=60, deadline=None)
@given(cost_lists, st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1)]))
def test_lock_step(costs: list[int], shape: tuple[int, int]) -> None:
    ranks, slots = shape
    best = min(sum(sorted(sums, reverse=True)[::ranks]) for sums in all_packings(costs[:6], ranks * slots))
    assert lock_step(costs[:6], ranks, slots) <= best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_fewest_packs(tokens: list[int]) -> None:
    needed = next(n for n in range(1, 7) if any(max(sums) <= 10 for sums in all_packings(tokens, n)))
    assert -(-sum(tokens) // 10) <= fewest_packs(tokens, 10) <= needed


def test_bounds_that_are_more_than_a_mean() -> None:
    assert dearest_pack([5, 5, 5], 2) == 10
    assert lock_step([9, 1, 1, 1], 2, 2) == 9
    assert lock_step([5, 5, 5], 2, 1) == 10
    assert fewest_packs([6, 6, 6, 6], 10) == 4
    assert fewest_packs([7, 7, 4, 4], 10) == 3


def test_long_rows_among_short_ones_cannot_be_even() -> None:
    assert reachable(longest_cost=120, short_cost=100, short_tokens=100, cap=100) == pytest.approx(1.2)
    assert reachable(longest_cost=90, short_cost=100, short_tokens=100, cap=100) == 1.0


def test_the_three_imbalances() -> None:
    step, slot, pack = imbalances([[4, 2], [1, 3]])
    assert (step, slot, pack) == (1.0, 7 * 2 / 10, 4 * 4 / 10)
    assert imbalances([[0, 0]]) == (1.0, 1.0, 1.0)
