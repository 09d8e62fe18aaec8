"""The parts of balancing: caps, moves, exchange, and the order of slots against brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_rows import SPEC

from flowtrain.packing import CostModel
from flowtrain.packing.balance import fewest_packs, improve, spread
from flowtrain.packing.branch_and_bound import NEAR, best_packs
from flowtrain.packing.load import Bin, Caps, Load
from flowtrain.packing.longest_first import longest_first
from flowtrain.packing.slots import johnson, makespan, overlap_order, slots_of
from flowtrain.packing.stock import Stock
from flowtrain.packing.table import Loader, LoadTable
from flowtrain.packing.window import Layout
from flowtrain.types import ImageMeta, SampleMeta

MOST = 60
SMALL = replace(
    SPEC,
    max_tokens=MOST,
    max_pack_vision_bytes=MOST,
    max_patches=MOST,
    max_images=3,
    block_bytes=lambda tokens, patches: tokens,
)
CAPS = Caps.of(SMALL)
LOADER = Loader(SMALL, CostModel.from_coefficients(token=1.0, token_pair=0.1))


def sample_of(position: int, text: int, vision: int = 0, patches: int = 0) -> SampleMeta:
    images = (ImageMeta(8, 8, vision, patches, patches**2),) if vision else ()
    return SampleMeta.of(position, position, str(position), text, vision, 1, images)


def load_of(position: int, text: int, vision: int = 0, patches: int = 0) -> Load:
    return LOADER([sample_of(position, text, vision, patches)]).loads()[0]


loads_lists = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=20
).map(lambda sizes: [load_of(position, *size) for position, size in enumerate(sizes)])


def keeps_caps(pack: Bin) -> bool:
    """By plain sums, beside the packed arithmetic."""
    samples = [load.sample for load in pack.loads]
    return (
        sum(sample.tokens for sample in samples) <= MOST
        and sum(sample.vision_tokens for sample in samples) <= MOST
        and sum(sample.patches for sample in samples) <= MOST
        and sum(len(sample.images) for sample in samples) <= 3
    )


@settings(max_examples=200, deadline=None)
@given(loads_lists)
def test_room_says_what_sums_say(loads: list[Load]) -> None:
    pack = Bin(CAPS.room)
    for load in loads:
        bigger = Bin(CAPS.room, [*pack.loads, load])
        fits = (pack.room - load.use) & CAPS.guards == CAPS.guards
        assert fits == keeps_caps(bigger)
        if fits:
            pack.add(load)


@settings(max_examples=100, deadline=None)
@given(loads_lists, st.integers(1, 6))
def test_improve_keeps_rows_and_caps_and_never_worsens(loads: list[Load], num_packs: int) -> None:
    bins = spread(loads, num_packs, CAPS)
    if bins is None:
        return
    dearest = max(pack.cost for pack in bins)
    improve(bins, CAPS)
    assert max(pack.cost for pack in bins) <= dearest
    assert sorted(load.position for pack in bins for load in pack.loads) == list(range(len(loads)))
    for pack in bins:
        assert keeps_caps(pack)
        assert pack.room == CAPS.room - sum(load.use for load in pack.loads)
        assert pack.cost == sum(load.cost for load in pack.loads)


@settings(max_examples=100, deadline=None)
@given(loads_lists)
def test_one_pack_a_row_always_fits(loads: list[Load]) -> None:
    assert spread(loads, len(loads), CAPS) is not None


def test_improve_finds_the_swap() -> None:
    loads = [load_of(n, tokens) for n, tokens in enumerate([25, 25, 20, 20, 15, 15])]
    bins = spread(loads, 2, CAPS)
    assert bins is not None
    improve(bins, CAPS)
    assert bins[0].cost == bins[1].cost


def ways(loads: Sequence[Load], num_packs: int) -> Iterator[list[Bin]]:
    """All packings that keep the caps."""
    for numbers in product(range(num_packs), repeat=len(loads)):
        bins = [Bin(CAPS.room) for _ in range(num_packs)]
        for load, number in zip(loads, numbers, strict=True):
            bins[number].add(load)
        if all(keeps_caps(pack) for pack in bins):
            yield bins


@settings(max_examples=60, deadline=None)
@given(loads_lists.map(lambda loads: loads[:6]), st.integers(1, 3))
def test_branch_and_bound_finds_what_trying_all_finds(loads: list[Load], num_packs: int) -> None:
    dearest = min((max(pack.cost for pack in bins) for bins in ways(loads, num_packs)), default=None)
    found = best_packs(loads, num_packs, CAPS)
    if found is None:
        assert dearest is None
        return
    assert dearest is not None
    assert dearest <= max(pack.cost for pack in found) <= dearest * (1 + 1 / NEAR)
    assert all(keeps_caps(pack) for pack in found)
    assert sorted(load.position for pack in found for load in pack.loads) == list(range(len(loads)))
    assert best_packs(loads, num_packs, CAPS, dearest) is None


def test_branch_and_bound_ends_by_its_number_of_nodes() -> None:
    """Rows of which no pack is even: the search is cut off, with the best that it has seen, which is the same again."""
    loads = [load_of(n, 19 + n % 3) for n in range(26)]
    first, second = (best_packs(loads, 13, CAPS) for _ in range(2))
    assert first is not None
    assert second is not None
    assert [pack.loads for pack in first] == [pack.loads for pack in second]


def test_few_rows_take_the_fewest_packs() -> None:
    """Neither the dearest nor the longest first fits them into three packs: 44 8 8, 24 24 6 6, 22 21 17."""
    loads = [load_of(n, tokens) for n, tokens in enumerate([44, 24, 24, 22, 21, 17, 8, 8, 6, 6])]
    assert spread(loads, 3, CAPS) is None
    assert [sum(load.tokens for load in pack.loads) for pack in fewest_packs(loads, 1, CAPS)] == [MOST] * 3


@settings(max_examples=100, deadline=None)
@given(loads_lists, loads_lists, st.booleans())
def test_exchange_comes_nearer_and_loses_nothing(inside: list[Load], outside: list[Load], above: bool) -> None:
    rows = LOADER([load.sample._replace(position=number) for number, load in enumerate([*inside, *outside])])
    pack = Bin(CAPS.room)
    for load in rows.loads(np.arange(len(inside))):
        if (pack.room - load.use) & CAPS.guards == CAPS.guards:
            pack.add(load)
    stock = Stock(rows, np.arange(len(inside), rows.num_rows), CAPS)
    target = pack.cost + 500
    stock.fill(pack, pack.cost + 200)
    before, together = pack.cost, {*(load.place for load in pack.loads), *stock.places}
    assert keeps_caps(pack)
    changed = stock.exchange(pack, target, above, kept=())
    assert abs(target - pack.cost) < abs(target - before) if changed else pack.cost == before
    assert above or pack.cost <= max(before, target)
    assert keeps_caps(pack)
    assert {*(load.place for load in pack.loads), *stock.places} == together
    left = rows.loads(np.array(stock.places, np.int64))
    assert sorted(left, key=lambda load: (load.cost, -load.place)) == left
    assert ([load.cost for load in left], [load.use for load in left]) == (stock.costs, stock.uses)
    assert set(pack.loads) <= set(rows.loads())


@settings(max_examples=100, deadline=None)
@given(loads_lists)
def test_slots_hold_neighbours_in_cost(loads: list[Load]) -> None:
    bins = spread(loads, 2 * len(loads), CAPS)
    assert bins is not None
    slots = slots_of(bins, 2)
    for before, after in pairwise(slots):
        assert min(pack.cost for pack in before) >= max(pack.cost for pack in after)


def two_stages(stages: list[tuple[int, int]], order: list[int]) -> int:
    first = second = 0
    for number in order:
        first += stages[number][0]
        second = max(first, second) + stages[number][1]
    return second


stage_lists = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(stage_lists)
def test_johnson_is_the_best_order(stages: list[tuple[int, int]]) -> None:
    order = johnson(stages)
    assert sorted(order) == list(range(len(stages)))
    assert two_stages(stages, order) == min(two_stages(stages, list(p)) for p in permutations(range(len(stages))))


@settings(max_examples=100, deadline=None)
@given(stage_lists)
def test_order_with_returning_gradients_is_close_to_the_best(stages: list[tuple[int, int]]) -> None:
    order = overlap_order(stages)
    assert sorted(order) == list(range(len(stages)))
    best = min(makespan(stages, p) for p in permutations(range(len(stages))))
    assert makespan(stages, order) <= min(makespan(stages, johnson(stages)), best + best // 4 + 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 0, 9, 12, 30]), st.integers(4, 12)), min_size=10, max_size=40))
def test_of_many_slots_both_ends_are_covered(stages: list[tuple[int, int]]) -> None:
    """Insertion, too slow for so many, would end hardly earlier."""
    order = overlap_order(stages)
    assert sorted(order) == list(range(len(stages)))
    best: list[int] = []
    for job in sorted(range(len(stages)), key=lambda n: (-sum(stages[n]), n)):
        orders = [[*best[:place], job, *best[place:]] for place in range(len(best) + 1)]
        best = min(orders, key=lambda tried: makespan(stages, tried))
    assert makespan(stages, order) <= 1.1 * makespan(stages, best)


def one_by_one(places: list[int], rows: LoadTable, bins: list[Bin], budgets: list[int]) -> list[int]:
    """`longest_first` as it is told: every row looks for the pack that lacks most."""
    spilled = []
    for load in sorted(rows.loads(np.array(places, np.int64)), key=lambda load: -load.cost):
        number = min(range(len(bins)), key=lambda n: (bins[n].cost - budgets[n], n))
        pack = bins[number]
        if pack.cost + load.cost <= budgets[number] and (pack.room - load.use) & CAPS.guards == CAPS.guards:
            pack.add(load)
        else:
            spilled.append(load.place)
    return spilled


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=60),
        st.lists(st.sampled_from([(3, 0, 0), (3, 1, 2), (7, 0, 0)]), min_size=1, max_size=30),
    ),
    st.one_of(
        st.lists(st.integers(-4, 100), min_size=1, max_size=9), st.lists(st.integers(0, 5), min_size=2, max_size=9)
    ),
    st.integers(0, 5),
)
def test_rounds_give_what_one_by_one_gives(
    sizes: list[tuple[int, int, int]], budgets: list[int], num_placed: int
) -> None:
    rows = LOADER([sample_of(position, *size) for position, size in enumerate(sizes)])
    # Multiples of a row's cost, so that packs lack the same.
    scaled = [budget * rows.costs[0].item() for budget in budgets]
    found: list[list[list[int]]] = []
    for how in (longest_first, None):
        bins = [Bin(CAPS.room) for _ in budgets]
        places = list(range(rows.num_rows))
        for load in rows.loads()[: min(num_placed, len(bins), len(places) - 1)]:
            bins[load.place].add(load)
            places.remove(load.place)
        if how is None:
            spilled = one_by_one(places, rows, bins, scaled)
        else:
            spilled = how(np.array(places, np.int64), rows, bins, scaled, CAPS).tolist()
        for pack in bins:
            assert pack.room == CAPS.room - sum(load.use for load in pack.loads)
            assert pack.cost == sum(load.cost for load in pack.loads)
        found.append([spilled, *([load.place for load in pack.loads] for pack in bins)])
    assert found[0] == found[1]


@settings(max_examples=200, deadline=None)
@given(loads_lists, st.lists(st.integers(0, 20), max_size=4))
def test_the_layout_is_next_fit_however_rows_come(loads: list[Load], cuts: list[int]) -> None:
    starts, room = [], None
    for number, load in enumerate(loads):
        if room is None or (room - load.use) & CAPS.guards != CAPS.guards:
            starts.append(number)
            room = CAPS.room
        room -= load.use
    sizes = LOADER([load.sample for load in loads]).sizes
    layout = Layout(CAPS, num_packs=1)
    for begin, end in pairwise([0, *sorted(min(cut, len(loads)) for cut in cuts), len(loads)]):
        layout.lay(sizes[:, begin:end])
    assert layout.starts == starts
