"""What every pack of a step is to cost, when the number of packs is given and the rows float.

A pack of short rows has the least cost per token: filled to `FILL` of the cap, it is the dearest that *every* pack can
be made, whatever rows it gets. Other caps (bytes of features, patches, images) bound it in the same way, by the mean
cost per byte, patch or image.
"""

from __future__ import annotations

from flowtrain.packing.load import FIELD, FIELD_BITS
from flowtrain.packing.policies.protocol import Draw

FILL_PERCENT = 99
OTHER_FILL_PERCENT = 95

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""


def budget_of(draw: Draw) -> int:
    """At least the cost of the window's cheapest row, so that a step is never empty."""
    cap = draw.spec.max_tokens
    longest_short = cap // SHORT_SHARE
    costs = [load.cost for load in draw.loads]
    short = [(load.cost, load.tokens) for load in draw.loads if load.tokens <= longest_short]
    short = short or [(load.cost, load.tokens) for load in draw.loads]
    tokens = max(1, sum([tokens for _, tokens in short]))
    budget = sum([cost for cost, _ in short]) * cap * FILL_PERCENT // (100 * tokens)
    cost, use = sum(costs), sum([load.use for load in draw.loads])
    for place, limit in enumerate(draw.caps.limits[1:], start=1):
        used = (use >> ((FIELD_BITS + 1) * place)) & FIELD
        if used:
            budget = min(budget, cost * limit * OTHER_FILL_PERCENT // (100 * used))
    return max(budget, min(costs))
