"""Ranks and coordinates, peers and lines of any layout."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.parallel.mesh import AXES, DATA_AXES, Axis, coordinates, degrees, dp_rank, lines, peers, rank_at
from flowtrain.plan import Layout

layouts = st.builds(Layout, *[st.integers(1, 3)] * 5)


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [coordinates(layout, rank) for rank in range(layout.world_size)]
    assert [rank_at(layout, place) for place in places] == list(range(layout.world_size))
    assert len({tuple(place[axis] for axis in AXES) for place in places}) == layout.world_size
    assert all(place[axis] < degree for place in places for axis, degree in degrees(layout).items())


@given(layouts)
def test_every_data_parallel_rank_has_the_same_number_of_peers(layout: Layout) -> None:
    of_ranks = [peers(layout, dp) for dp in range(layout.dp_degree)]
    assert sorted(rank for ranks in of_ranks for rank in ranks) == list(range(layout.world_size))
    assert {len(ranks) for ranks in of_ranks} == {layout.tp * layout.cp * layout.pp}
    assert all(dp_rank(layout, rank) == dp for dp, ranks in enumerate(of_ranks) for rank in ranks)


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_lines_of_axes_part_the_ranks(layout: Layout, chosen: set[Axis]) -> None:
    axes = tuple(axis for axis in AXES if axis in chosen)
    found = lines(layout, axes)
    assert sorted(rank for line in found for rank in line) == list(range(layout.world_size))
    for line in found:
        assert list(line) == sorted(line)
        fixed = [{axis: coordinates(layout, rank)[axis] for axis in AXES if axis not in axes} for rank in line]
        assert all(place == fixed[0] for place in fixed)


def test_the_order_of_ranks_is_that_of_the_contract() -> None:
    """From the inside: tp, cp, dp_shard, dp_replicate, pp."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, cp=2, pp=2)
    order = product(range(2), repeat=5)
    assert [tuple(coordinates(layout, rank)[axis] for axis in AXES) for rank in range(32)] == list(order)
    assert lines(layout, ("tp",))[0] == (0, 1)
    assert lines(layout, DATA_AXES)[0] == (0, 4, 8, 12)
