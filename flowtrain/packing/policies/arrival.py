"""`arrival`: rows as they come. A pack is closed when the next row does not fit (next-fit); packs go to ranks in turn.

What simple loaders do. It has nothing to set: looking further ahead would change nothing.
"""

from __future__ import annotations

from flowtrain.packing.policies.parts import dealt, next_fit, oldest_packs
from flowtrain.packing.policies.protocol import Draw, Policy, Slots


class Arrival(Policy):
    def compose(self, draw: Draw) -> Slots:
        return dealt(draw, oldest_packs(draw, next_fit))
