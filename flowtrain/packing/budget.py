"""What every pack of a step is to cost, when the number of packs is given and the rows float.

A pack of short rows has the least cost per token: filled to `FILL` of the cap, it is the dearest that *every* pack can
be made, whatever rows it gets. Other caps (bytes of features, patches, images) bound it in the same way, by the mean
cost per byte, patch or image.
"""

from __future__ import annotations

from math import gcd

from flowtrain.packing.load import FIELD, FIELD_BITS
from flowtrain.packing.policies.protocol import Draw

FILL_PERCENT = 99
OTHER_FILL_PERCENT = 95
AS_THEY_ARE_PERCENT = 96

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""


OTHERS_PERCENT = (97, 94, 90, 85)


def budgets_of(draw: Draw, num_packs: int) -> list[int]:
    """The budget, then others to try where it leaves packs uneven: lower ones, a full pack of rows as they are,
    and costs of single rows (dearest, third quartile, median) for rows of which one fills a pack.

    Each is at least the cost of the window's cheapest row, so that a step is never empty. What is left at the end of
    the data is spread over the steps that it takes.
    """
    cap = draw.spec.max_tokens
    longest_short = cap // SHORT_SHARE
    costs = [load.cost for load in draw.loads]
    short = [(load.cost, load.tokens) for load in draw.loads if load.tokens <= longest_short]
    short = short or [(load.cost, load.tokens) for load in draw.loads]
    tokens = max(1, sum([tokens for _, tokens in short]))
    # Rows of a few sizes fill a pack to the last token or leave a large part of it empty.
    coarse = gcd(*[tokens for _, tokens in short]) * 100 > cap * (100 - FILL_PERCENT)
    budget = sum([cost for cost, _ in short]) * cap * (100 if coarse else FILL_PERCENT) // (100 * tokens)
    cost, use = sum(costs), sum([load.use for load in draw.loads])
    for place, limit in enumerate(draw.caps.limits[1:], start=1):
        used = (use >> ((FIELD_BITS + 1) * place)) & FIELD
        if used:
            budget = min(budget, cost * limit * OTHER_FILL_PERCENT // (100 * used))
    tokens = max(1, sum([load.tokens for load in draw.loads]))
    full = cost * cap * AS_THEY_ARE_PERCENT // (100 * tokens)
    if draw.last:
        steps = max(2, -(-cost // max(1, num_packs * budget)))
        budget = min(budget, cost * 101 // (100 * steps * num_packs))
    costs.sort()
    single = [costs[len(costs) * part // 4 - 1] for part in (4, 3, 2) if len(costs) >= 4]
    found = [budget, *(budget * percent // 100 for percent in OTHERS_PERCENT), full, *single]
    return [max(budget, min(costs)) for budget in found]
