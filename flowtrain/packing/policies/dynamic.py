"""`dynamic`: packs of equal cost out of a window of several steps, with a promise on how long a row may wait.

A step of given packs (K = packs over all ranks):

1. *Budget*: what a pack full of short rows costs. Every pack is to cost just that, so steps are alike. Where that
   leaves packs uneven (a window without short rows), other budgets are tried and the best use of time wins.
2. *Dear rows*, those that alone cost more than the budget, run together: as soon as there is one for every rank, or one
   is due, they get a slot, whose budget is the dearest of them.
3. Rows that are due come first; then the oldest rows, as many as take `PREFIX` of the budgets: dearest first into the
   pack that lacks most; a row without room goes back.
4. *Fill*: the pack that lacks most takes the dearest row that fits what it lacks, again until none fits.
5. *Exchange*: a pack that still lacks something exchanges one of its rows for the one that brings it nearest.
6. *Moves*: where no budget evens the packs out (long rows only, few a pack), packs exchange rows with one another.
7. Slots, ranks and order of slots (`flowtrain.packing.slots`).

A step of given rows: the rows that are due and one row, the oldest, of each stratum of cost; the fewest packs that hold
them; exchange with rows left out, so that every pack costs the mean; moves between packs; slots as above. Where that is
uneven by more than `MOST_UNEVEN`, rows that alone cost more than the packs do on average wait for a dearer step.

Invariants: all of `draw.due` are taken; caps are kept. Decisions compare whole numbers only, ties fall by position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

import numpy as np

from flowtrain.packing.balance import even_out, fewest_packs, spread
from flowtrain.packing.budget import budgets_of
from flowtrain.packing.load import Bin, Caps, Ints, Load
from flowtrain.packing.longest_first import longest_first
from flowtrain.packing.policies.protocol import Draw, Due, Policy, Slots
from flowtrain.packing.slots import ordered_slots, slots_of
from flowtrain.packing.spec import CompositionSpec, Sync
from flowtrain.packing.stock import Stock
from flowtrain.packing.table import LoadTable

PREFIX_PERCENT = 97

STOCK_PER_PACK = 4
STOCK_ROWS = 1024
"""Rows behind the oldest among which packs find what they lack: enough for a dense choice, few enough to be quick."""

EVEN_SHARE = 250
"""Budgets other than the first are tried when ranks that meet in every slot lose more than this share (one in …)."""

BEAT_SHARE = 4

GRACE_SHARE = 100
"""Rows may wait beyond the usual bound when ranks would lose more than this share (one in …)."""

OVERHEAD_SHARE = 40
"""What a microbatch costs however little it holds, as a share of its budget: weighs even packs against full ones."""

MOST_SHORTENED = 16
LEFT_OVER_PERCENT = 15
"""Long rows exchanged for short ones to save a slot, also where the window's mean is so much above what slots hold."""

MOST_UNEVEN = Fraction(11, 10)
MOST_PUT_OFF = 4
"""Times that dear rows are taken out of a step of given rows more uneven than that: without them others are dear."""

ROUNDS = 2
"""Exchanges a pack may make."""

EXCHANGE_ABOVE = 2000
"""A pack that lacks less than this share (one in …) of its budget is left alone."""


class Dynamic(Policy):
    bounded = True

    def steps_ahead(self, spec: CompositionSpec) -> int:
        return spec.lookahead

    def compose(self, draw: Draw) -> Slots:
        bins = _given_rows(draw) if draw.num_packs is None else _given_packs(draw, draw.num_packs)
        return ordered_slots(slots_of(bins, draw.num_ranks), draw.spec.trainable_encoder)


# --- steps of given packs ---------------------------------------------------------------------------------------------


def _given_packs(draw: Draw, num_packs: int) -> list[Bin]:
    if draw.last and (bins := spread(draw.loads, num_packs, draw.caps)) is not None:
        return even_out(bins, draw.caps)
    usual = next(budgets_of(draw, num_packs))
    overhead = usual // OVERHEAD_SHARE * (num_packs // draw.num_ranks)
    best: list[Bin] = []
    slots, cost = 1, 0
    # Rows that have waited for the usual bound come first; only a step uneven with them is tried without.
    for due, share in ((should_have(draw), EVEN_SHARE), (draw.due, GRACE_SHARE)):
        if best and (due is draw.early or slots * draw.num_ranks * share <= cost * (share + 1)):
            break
        for budget in budgets_of(draw, num_packs):
            other = _packs_of(draw, num_packs, budget, due)
            other_slots, other_cost = _spent(other, draw.num_ranks, draw.spec.sync, usual)
            if (other_slots + overhead) * cost < (slots + overhead) * other_cost:
                best, slots, cost = other, other_slots, other_cost
            if slots * draw.num_ranks * EVEN_SHARE <= cost * (EVEN_SHARE + 1):
                return best
    moved = even_out([Bin(pack.room, list(pack.loads), pack.cost) for pack in best], draw.caps)
    return moved if _spent(moved, draw.num_ranks, draw.spec.sync, usual) < (slots, cost) else best


def should_have(draw: Draw) -> Due:
    """Rows that have waited for the usual bound, if they are all of those that are due."""
    early = {load.position for load in draw.early.loads}
    return draw.early if all(load.position in early for load in draw.due.loads) else draw.due


def _spent(bins: Sequence[Bin], num_ranks: int, sync: Sync, budget: int) -> tuple[int, int]:
    """Time of a step, and the cost of its packs: ranks meet in every slot, or in every beat of a pipeline.

    Where they meet in slots, slots unlike each other still count a little, unless a dear row makes them so.
    """
    dearest = max(bins, key=lambda pack: pack.cost)
    costs = sorted([pack.cost for pack in bins], reverse=True)
    slots, beats = sum(costs[::num_ranks]), costs[0] * len(costs) // num_ranks
    if sync == "beat":
        return beats, sum(costs)
    if any(load.cost > budget for load in dearest.loads):
        return slots, sum(costs)
    return slots + (beats - slots) // BEAT_SHARE, sum(costs)


def _packs_of(draw: Draw, num_packs: int, budget: int, due: Due) -> list[Bin]:
    """Steps 2 to 5."""
    rows, caps = draw.rows, draw.caps
    bins, budgets = _dear_slots(draw, num_packs, budget, due)
    taken = {load.place for pack in bins for load in pack.loads}
    if not _place_due([load.place for load in due.loads if load.place not in taken], rows, bins, budgets, caps):
        bins = [draw.empty_pack() for _ in range(num_packs)]
        for pack, loads in zip(bins, due.packs, strict=False):
            for load in loads:
                pack.add(load)
        budgets = [budget] * num_packs
    free = rows.costs <= max(budgets)
    free[[load.place for pack in bins for load in pack.loads]] = False
    lacking = sum(most - pack.cost for pack, most in zip(bins, budgets, strict=True) if pack.cost < most)
    prefix, behind = _oldest(np.flatnonzero(free), rows.costs, lacking * PREFIX_PERCENT // 100)
    spilled = longest_first(prefix, rows, bins, budgets, caps)
    behind = behind[: STOCK_PER_PACK * num_packs + STOCK_ROWS]
    stock = Stock(rows, np.concatenate([spilled, behind]), caps)
    for number in sorted(range(num_packs), key=lambda n: bins[n].cost - budgets[n]):
        stock.fill(bins[number], budgets[number])
    kept = {load.position for load in due.loads}
    for pack, most in zip(bins, budgets, strict=True):
        for _ in range(ROUNDS):
            if most - pack.cost <= most // EXCHANGE_ABOVE or not stock.exchange(pack, most, False, kept):
                break
    return bins


def _dear_slots(draw: Draw, num_packs: int, budget: int, due: Due) -> tuple[list[Bin], list[int]]:
    """Step 2: packs and their budgets, dear rows placed as the first of their packs."""
    ranks, rows = draw.num_ranks, draw.rows
    places = np.flatnonzero(rows.costs > budget)
    dear = rows.loads(places[np.argsort(rows.dues[places], kind="stable")])
    now = {load.position for load in due.loads}
    num_due = max((number for number, load in enumerate(dear, start=1) if load.position in now), default=0)
    num_slots = min(max(len(dear) // ranks, -(-num_due // ranks)), num_packs // ranks)
    bins = [draw.empty_pack() for _ in range(num_packs)]
    budgets = [budget] * num_packs
    released = sorted(dear[: num_slots * ranks], key=lambda load: (-load.cost, load.position))
    for slot in range(num_slots):
        group = released[slot * ranks : (slot + 1) * ranks]
        for rank in range(ranks):
            budgets[slot * ranks + rank] = group[0].cost
        for rank, load in enumerate(group):
            bins[slot * ranks + rank].add(load)
    return bins, budgets


def _place_due(due: Sequence[int], rows: LoadTable, bins: Sequence[Bin], budgets: Sequence[int], caps: Caps) -> bool:
    """Step 3, rows that must be in this step: where they fit the budget, else where they fit at all."""
    if not due:
        return True
    for load in rows.loads(longest_first(np.array(due, np.int64), rows, bins, budgets, caps)):
        fitting = [n for n in range(len(bins)) if (bins[n].room - load.use) & caps.guards == caps.guards]
        if not fitting:
            return False
        bins[min(fitting, key=lambda n: (bins[n].cost - budgets[n], n))].add(load)
    return True


def _oldest(places: Ints, costs: Ints, most: int) -> tuple[Ints, Ints]:
    """The oldest rows of which all but the last together cost less than `most`, and those behind them."""
    num = int(np.searchsorted(np.cumsum(costs[places]), most)) + 1 if most > 0 else 0
    return places[:num], places[num:]


# --- steps of given rows ----------------------------------------------------------------------------------------------


def _given_rows(draw: Draw) -> list[Bin]:
    """Where the step is uneven, rows that alone cost more than its packs do on average wait for dearer steps: while
    they may, and as long as there are others."""
    assert draw.num_rows is not None
    best, loads = _packs_of_rows(draw, draw.loads, should_have(draw).loads), draw.loads
    if _unevenness(best) <= MOST_UNEVEN:
        return best
    kept = {load.position for load in draw.due.loads}
    for _ in range(MOST_PUT_OFF):
        mean = sum(pack.cost for pack in best) // len(best)
        loads = [load for load in loads if load.cost <= mean or load.position in kept]
        if len(loads) < draw.num_rows:
            break
        best = min(best, _packs_of_rows(draw, loads, draw.due.loads), key=_unevenness)
    return best


def _unevenness(bins: Sequence[Bin]) -> Fraction:
    """The dearest pack over the mean."""
    return Fraction(max(pack.cost for pack in bins) * len(bins), sum(pack.cost for pack in bins))


def _packs_of_rows(draw: Draw, loads: Sequence[Load], due: Sequence[Load]) -> list[Bin]:
    """A step of rows out of these, with those that are due."""
    assert draw.num_rows is not None
    chosen = choose(loads, draw.num_rows, due)
    chosen = shortened(draw, chosen, {load.position for load in due})
    bins = fewest_packs(chosen, draw.num_ranks, draw.caps)
    taken = {load.position for load in chosen}
    left = [load.place for load in loads if load.position not in taken]
    if left:
        target = sum(pack.cost for pack in bins) // len(bins)
        stock = Stock(draw.rows, np.array(left[: STOCK_PER_PACK * len(bins) + STOCK_ROWS]), draw.caps)
        kept = {load.position for load in due}
        for pack in bins:
            for _ in range(ROUNDS):
                if abs(target - pack.cost) <= target // EXCHANGE_ABOVE or not stock.exchange(pack, target, True, kept):
                    break
    return even_out(bins, draw.caps)


def shortened(draw: Draw, chosen: list[Load], kept: Collection[int]) -> list[Load]:
    """The rows of a step, some long ones exchanged for short ones, where that saves a slot.

    Only a slot that rows of the window's mean length hardly need: long rows put off for ever would need it later.
    """
    caps, ranks, loads = draw.caps, draw.num_ranks, draw.loads
    mean = sum([load.tokens for load in loads]) * len(chosen) // len(loads)
    # A little above a whole number of slots, long rows wait for a window that has fewer of them, or until they are due.
    wanted = max(1, -(-mean * 100 // (caps.limits[0] * ranks * (100 + LEFT_OVER_PERCENT)))) * ranks
    taken = {load.position for load in chosen}
    short = sorted(
        (load for load in loads if load.position not in taken), key=lambda load: (load.tokens, load.position)
    )
    long = sorted((n for n in range(len(chosen)) if chosen[n].position not in kept), key=lambda n: -chosen[n].tokens)
    found = list(chosen)
    for place, load in zip([None, *long[:MOST_SHORTENED]], [None, *short[:MOST_SHORTENED]], strict=False):
        if place is not None and load is not None:
            if load.tokens >= found[place].tokens:
                break
            found[place] = load
        if caps.fewest_packs(found) <= wanted and spread(found, wanted, caps) is not None:
            return found
    return chosen


def choose(loads: Sequence[Load], num_rows: int, due: Sequence[Load]) -> list[Load]:
    """The rows of a step, out of a window in position order.

    The rest beside those due is sorted by cost and cut into as many strata as rows are missing; the oldest row of each
    stratum is taken. So every step has its share of dear rows, and its cost is near the mean.
    """
    chosen = list(due)
    taken = {load.position for load in due}
    rest = sorted((load for load in loads if load.position not in taken), key=lambda load: (load.cost, load.position))
    missing = min(num_rows - len(chosen), len(rest))
    for number in range(missing):
        stratum = rest[number * len(rest) // missing : (number + 1) * len(rest) // missing]
        chosen.append(min(stratum, key=lambda load: load.position))
    return chosen
