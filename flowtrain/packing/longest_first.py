"""Dearest row first into the pack that lacks most: thousands of rows, many at a time.

Each row goes into the pack that lacks most of its budget, the first of these; where the row costs more than that pack
lacks, or a cap leaves no room, it is left out. Done one by one, the packs stand in order of what they lack, and the
next row takes the first of them:

    packs by lack   12  11  10   9   8      As long as the first pack that is still as it was lacks more than all that
    rows by cost     7   7   6   5   5      have got a row since, the order of the rest stands: 7 → 12, 7 → 11, 6 → 10,
    lack after       5   4   4   4   3      5 → 9, 5 → 8 are one round. Then the packs are ordered anew.

Early on, a round is a row for every pack, so rounds are about as many as a pack has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from flowtrain.packing.load import COST, USE, Bin, Bools, Caps, Ints
from flowtrain.packing.table import LoadTable


def longest_first(places: Ints, rows: LoadTable, bins: Sequence[Bin], budgets: Sequence[int], caps: Caps) -> Ints:
    """The rows at these places into packs, dearest first, among equals in the order given; returns the places of those
    left out, in that order."""
    places = places[np.argsort(-rows.costs[places], kind="stable")]
    costs, sizes = rows.costs[places], rows.sizes[:, places]
    lacks = np.array([most - pack.cost for pack, most in zip(bins, budgets, strict=True)], np.int64)
    rooms = caps.rooms_left(bins)
    pack_of = np.full(len(places), -1)
    row = 0
    while row < len(places):
        order = np.argsort(-lacks, kind="stable")
        before = lacks[order]
        if before[0] < 0:
            break
        begin, most_after = 0, -1
        while begin < len(order) and row < len(places) and before[begin] > most_after:
            num = min(len(order) - begin, len(places) - row)
            packs, these = order[begin : begin + num], slice(row, row + num)
            after = before[begin : begin + num] - costs[these]
            fits = (after >= 0) & (sizes[:, these] <= rooms[:, packs]).all(axis=0)
            highest = np.maximum.accumulate(after)
            first = np.ones(num, np.bool_)
            first[1:] = before[begin + 1 : begin + num] > np.maximum(highest[:-1], most_after)
            num = _leading(fits & first)
            if num:
                packs, these = packs[:num], slice(row, row + num)
                lacks[packs], pack_of[these] = after[:num], packs
                rooms[:, packs] -= sizes[:, these]
                most_after = max(most_after, int(highest[num - 1]))
                begin, row = begin + num, row + num
            elif not fits[0]:
                # The pack stays first until a row comes for which it has room.
                fitting = (costs[row:] <= before[begin]) & (sizes[:, row:] <= rooms[:, order[begin], None]).all(axis=0)
                row += _leading(~fitting)
    _into_bins(places, pack_of, rows, bins)
    return places[pack_of < 0]


def _leading(flags: Bools) -> int:
    """How many are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _into_bins(places: Ints, pack_of: Ints, rows: LoadTable, bins: Sequence[Bin]) -> None:
    given = np.flatnonzero(pack_of >= 0)
    by_pack = given[np.argsort(pack_of[given], kind="stable")]
    loads = iter(rows.loads(places[by_pack]))
    counts = np.bincount(pack_of[given], minlength=len(bins)).tolist()
    for pack, count in zip(bins, counts, strict=True):
        if count:
            more = list(islice(loads, count))
            pack.loads += more
            pack.cost += sum(map(COST, more))
            pack.room -= sum(map(USE, more))
