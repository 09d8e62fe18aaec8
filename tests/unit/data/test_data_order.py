"""The order of rows: a permutation each epoch, another one the next, the same for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data.order import Order


@given(num_rows=st.integers(1, 300), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = Order(num_rows, seed)
    rows = [order.row(epoch * num_rows + place) for place in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))
    assert order.epoch(epoch * num_rows) == epoch


@given(num_rows=st.integers(1, 50), position=st.integers(0, 500))
def test_unshuffled_order_is_the_order_of_the_file(num_rows: int, position: int) -> None:
    assert Order(num_rows, 7, shuffle=False).row(position) == position % num_rows


def test_epochs_and_seeds_differ() -> None:
    def rows(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Order(100, seed).row(epoch * 100 + place) for place in range(100))

    drawn = {rows(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(drawn) == 25
    assert tuple(range(100)) not in drawn


def test_every_row_comes_to_every_place_about_equally_often() -> None:
    """Chi-square over 5 × 5 cells of 4,000 orders: 16 degrees of freedom, below 50 but for one seed in 40,000."""
    counts = [[0] * 5 for _ in range(5)]
    for seed in range(4000):
        for place in range(5):
            counts[place][Order(5, seed).row(place)] += 1
    chi_square = sum((count - 800) ** 2 / 800 for line in counts for count in line)
    assert chi_square < 50


def test_the_order_is_the_same_in_every_version() -> None:
    """A resumed run relies on it: a change of these figures would train other rows than the run it goes on with."""
    assert [Order(10, 0).row(position) for position in range(10)] == [5, 3, 1, 7, 8, 6, 9, 0, 4, 2]


@pytest.mark.parametrize("num_rows", [10_000_019, 2**40])
def test_a_far_position_of_a_large_source_needs_no_table(num_rows: int) -> None:
    order = Order(num_rows, 3)
    rows = {order.row(position) for position in range(num_rows, num_rows + 1000)}
    assert len(rows) == 1000
    assert max(rows) < num_rows
