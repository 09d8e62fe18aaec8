"""`raw_size`: whole packs reordered by their image load, within and between microbatches, as DistTrain does.

Packs are those of `arrival`. Within the step they are spread over the ranks so that every rank has the same image load
(most patches first, to the rank with the fewest); between microbatches, each rank runs its packs in the order in which
encoding hides best behind training. What the backbone has to do is not looked at. It has nothing to set.
"""

from __future__ import annotations

from flowtrain.packing.load import Bin
from flowtrain.packing.policies.parts import dealt, next_fit, oldest_packs
from flowtrain.packing.policies.protocol import Draw, Policy, Slots
from flowtrain.packing.slots import johnson


class RawSize(Policy):
    def compose(self, draw: Draw) -> Slots:
        slots = dealt(draw, oldest_packs(draw, next_fit))
        packs = [pack for slot in slots for pack in slot]
        ranks: list[list[Bin]] = [[] for _ in range(draw.num_ranks)]
        patches = [0] * draw.num_ranks
        for pack in sorted(packs, key=lambda pack: (-_patches(pack), pack.first_position)):
            open_ranks = [rank for rank in range(draw.num_ranks) if len(ranks[rank]) < len(slots)]
            rank = min(open_ranks, key=lambda rank: (patches[rank], rank))
            ranks[rank].append(pack)
            patches[rank] += _patches(pack)
        orders = [[packs[n] for n in johnson([(pack.encode, pack.cost) for pack in packs])] for packs in ranks]
        return [list(slot) for slot in zip(*orders, strict=True)]


def _patches(pack: Bin) -> int:
    return sum(load.sample.patches for load in pack.loads)
