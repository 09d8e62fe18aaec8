"""What a sample takes of a pack, and packs in the making.

Every cap of a pack is checked at once: a *use* is one integer that holds a number for each cap side by side, each in a
field of `FIELD_BITS` with a guard bit above it.

    room   1│tokens left │ 1│bytes left │ …        guards set
    use    0│tokens      │ 0│bytes      │ …
    room − use: the guard of a field stays 1 exactly where the use fits, and no field borrows from its neighbour

Invariants: a bin's cost and room are those of its loads; no guard of a room is ever 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.packing.cost import CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

FIELD_BITS = 52
"""Numbers below 2^52: 4 PiB of features in a whole window."""
FIELD = (1 << FIELD_BITS) - 1


class Load(NamedTuple):
    """A sample with what it takes. `due` is the last step in which it may run, `heavy` whether it alone costs more than
    a pack that is full of short ones."""

    cost: int
    use: int
    position: int
    tokens: int
    encode: int
    patches: int
    vision_bytes: int
    sample: SampleMeta
    due: int
    heavy: bool


@dataclass(frozen=True, slots=True)
class Caps:
    """Most of a pack, one number a cap. `room` is an empty pack's, guards included; `own_pack` lets a row with more
    tokens than a pack may have fill a pack of its own."""

    limits: tuple[int, ...]
    spec: CompositionSpec
    room: int
    guards: int

    @classmethod
    def of(cls, spec: CompositionSpec) -> Caps:
        wanted = (spec.max_tokens, spec.max_pack_vision_bytes, spec.max_patches, spec.max_images)
        limits = tuple(min(limit, (1 << FIELD_BITS) - 1) for limit in wanted if limit is not None)
        guards = sum(1 << ((FIELD_BITS + 1) * place + FIELD_BITS) for place in range(len(limits)))
        room = guards + sum(limit << ((FIELD_BITS + 1) * place) for place, limit in enumerate(limits))
        return cls(limits, spec, room, guards)

    def uses(self, sample: SampleMeta) -> tuple[int, ...]:
        """One number for each cap; a row of its own pack takes all the tokens there are."""
        spec = self.spec
        uses = [min(sample.tokens, spec.max_tokens), spec.vision_bytes(sample)]
        if spec.max_patches is not None:
            uses.append(sample.patches)
        if spec.max_images is not None:
            uses.append(len(sample.images))
        return tuple(uses)

    def load(self, sample: SampleMeta, cost: CostModel, due: int = 0, heavy: bool = False) -> Load:
        uses = self.uses(sample)
        use = 0
        for number in reversed(uses):
            use = (use << (FIELD_BITS + 1)) + number
        encode, patches = (cost.encode_cost((sample,)), sample.patches) if sample.images else (0, 0)
        return Load(
            cost.sample_cost(sample), use, sample.position, uses[0], encode, patches, uses[1], sample, due, heavy
        )

    @property
    def tokens_field(self) -> int:
        """Mask of the tokens in a room, without the guard."""
        return FIELD

    def target(self, num_packs: int) -> int:
        """A room whose first lost guard says that a use fills `num_packs` packs by some cap."""
        return self.guards + sum(
            min(max(num_packs * limit, 1), (1 << FIELD_BITS)) - 1 << ((FIELD_BITS + 1) * place)
            for place, limit in enumerate(self.limits)
        )

    def fewest_packs(self, loads: Iterable[Load]) -> int:
        """No fewer packs can hold these, by any one cap."""
        total = sum(load.use for load in loads)
        return max(
            -(-((total >> ((FIELD_BITS + 1) * place)) & FIELD) // max(limit, 1))
            for place, limit in enumerate(self.limits)
        )


@dataclass(slots=True, eq=False)
class Bin:
    """A pack in the making."""

    room: int
    loads: list[Load] = field(default_factory=list)
    cost: int = 0

    def add(self, load: Load) -> None:
        self.loads.append(load)
        self.cost += load.cost
        self.room -= load.use

    def remove(self, load: Load) -> None:
        for place, other in enumerate(self.loads):
            if other is load:
                del self.loads[place]
                break
        self.cost -= load.cost
        self.room += load.use

    @property
    def tokens(self) -> int:
        return sum(load.tokens for load in self.loads)

    @property
    def encode(self) -> int:
        return sum(load.encode for load in self.loads)

    @property
    def first_position(self) -> int:
        """Of its oldest sample; empty packs come last."""
        return min((load.position for load in self.loads), default=2**63)
