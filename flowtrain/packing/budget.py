"""What every pack of a step is to cost, when the number of packs is given and the rows float.

A pack of short rows has the least cost per token: filled to `FILL` of the cap, it is the dearest that *every* pack can
be made, whatever rows it gets. Other caps (bytes of features, patches, images) bound it in the same way, by the mean
cost per byte, patch or image.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np

from flowtrain.packing.policies.protocol import Draw

FILL_PERCENT = 99
OTHER_FILL_PERCENT = 95
AS_THEY_ARE_PERCENT = 96
OTHERS_PERCENT = (97, 94, 90, 85)

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""

NUM_LOOKED_AT = 64
"""Rows whose sizes tell whether rows come in a few sizes only."""


def budgets_of(draw: Draw, num_packs: int) -> Iterator[int]:
    """The budget, then others to try where it leaves packs uneven: lower ones, a full pack of rows as they are,
    and costs of single rows (dearest, third quartile, median) for rows of which one fills a pack.

    Each is at least the cost of the window's cheapest row, so that a step is never empty. What is left at the end of
    the data is spread over the steps that it takes.
    """
    cap, rows = draw.spec.max_tokens, draw.rows
    used = rows.sizes.sum(axis=1).tolist()
    cost, tokens = int(rows.costs.sum()), max(1, used[0])
    # Rows of a few sizes fill a pack to the last token or leave a large part of it empty.
    coarse = gcd(*rows.tokens[:NUM_LOOKED_AT].tolist()) * 100 > cap * (100 - FILL_PERCENT)
    short = rows.tokens <= cap // SHORT_SHARE
    short_cost, short_tokens = int(rows.costs[short].sum()), int(rows.tokens[short].sum())
    if not short_tokens:
        short_cost, short_tokens = cost, tokens
    budget = short_cost * cap * (100 if coarse else FILL_PERCENT) // (100 * short_tokens)
    for of_cap, limit in zip(used[1:], draw.caps.limits[1:], strict=True):
        if of_cap:
            budget = min(budget, cost * limit * OTHER_FILL_PERCENT // (100 * of_cap))
    if draw.last:
        steps = max(2, -(-cost // max(1, num_packs * budget)))
        budget = min(budget, cost * 101 // (100 * steps * num_packs))
    yield max(budget, int(rows.costs.min()))
    costs = np.sort(rows.costs).tolist()
    for percent in OTHERS_PERCENT:
        yield max(budget * percent // 100, costs[0])
    yield max(cost * cap * AS_THEY_ARE_PERCENT // (100 * tokens), costs[0])
    if len(costs) >= 4:
        yield from (costs[len(costs) * part // 4 - 1] for part in (4, 3, 2))
