"""`paper`: the FlowTrain paper's Algorithm 1.

1. Rows in order of arrival, each into the fullest pack with room (best fit; a sorted list of free tokens stands for the
   paper's segment tree); no pack with room: a new one.
2. Cost of a pack: Σℓ / L + ℓmax² / L², L the cap. (Attention within a pack really costs Σℓ².)
3. Packs sorted by that cost, cut into buckets of one pack a rank, each bucket dealt over the ranks there and back
   (zig-zag).

Costs are compared as whole numbers, multiplied by L². Best settings: rows of two steps, of whose packs those with the
oldest rows are taken; one bucket for each slot, so that the packs that run together are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.packing.balance import find_room, put_in_order
from flowtrain.packing.load import Bin, Load
from flowtrain.packing.policies.parts import dealt, oldest_packs, two_steps
from flowtrain.packing.policies.protocol import Draw, Policy, Slots
from flowtrain.packing.spec import CompositionSpec


class Paper(Policy):
    def steps_ahead(self, spec: CompositionSpec) -> int:
        return two_steps(spec)

    def compose(self, draw: Draw) -> Slots:
        slots = dealt(draw, oldest_packs(draw, best_fit_in_order))
        cap = draw.spec.max_tokens
        ordered = sorted(
            (pack for slot in slots for pack in slot),
            key=lambda pack: (-paper_cost(pack, cap), pack.first_position),
        )
        ranks = draw.num_ranks
        buckets = [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]
        return [bucket[::-1] if number % 2 else bucket for number, bucket in enumerate(buckets)]


def paper_cost(pack: Bin, cap: int) -> int:
    """Step 2, times L²."""
    longest = max((load.tokens for load in pack.loads), default=0)
    return pack.tokens * cap + longest * longest


def best_fit_in_order(draw: Draw, loads: Sequence[Load]) -> list[Bin]:
    """Step 1: packs that hold all of these rows."""
    packs: list[Bin] = []
    order: list[tuple[int, int]] = []
    for load in loads:
        place = find_room(order, packs, load, draw.caps)
        if place is None:
            packs.append(draw.empty_pack())
            order.insert(0, (-draw.caps.limits[0], len(packs) - 1))
            place = 0
        put_in_order(order, place, packs, load)
    return packs
