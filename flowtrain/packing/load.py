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
from flowtrain.types import ImageMeta, SampleMeta

FIELD_BITS = 52
"""Numbers below 2^52: 4 PiB of features in a whole window."""
MOST_KNOWN = 100_000

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


@dataclass(slots=True)
class ImageCosts:
    """Costs of images by their patches, of which there are few: rows come by the thousand."""

    cost: CostModel | None = None
    known: dict[int, int] = field(default_factory=dict)

    def restart(self, cost: CostModel) -> None:
        self.cost, self.known = cost, {}

    def add(self, image: ImageMeta) -> int:
        assert self.cost is not None
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        found = self.known[image.patches] = self.cost.image_cost(image)
        return found


@dataclass(frozen=True, slots=True)
class Caps:
    """Most of a pack, one number a cap. `room` is an empty pack's, guards included; `own_pack` lets a row with more
    tokens than a pack may have fill a pack of its own."""

    limits: tuple[int, ...]
    spec: CompositionSpec
    room: int
    guards: int
    image_costs: ImageCosts = field(default_factory=lambda: ImageCosts(), compare=False)

    @classmethod
    def of(cls, spec: CompositionSpec) -> Caps:
        wanted = (spec.max_tokens, spec.max_pack_vision_bytes, spec.max_patches, spec.max_images)
        limits = tuple(min(limit, (1 << FIELD_BITS) - 1) for limit in wanted if limit is not None)
        guards = sum(1 << ((FIELD_BITS + 1) * place + FIELD_BITS) for place in range(len(limits)))
        room = guards + sum(limit << ((FIELD_BITS + 1) * place) for place, limit in enumerate(limits))
        return cls(limits, spec, room, guards)

    def load(self, sample: SampleMeta, cost: CostModel, due: int = 0, heavy: bool = False) -> Load:
        """What a sample takes; a row of its own pack takes all the tokens there are."""
        spec, tokens = self.spec, sample.tokens
        taken = tokens if tokens <= spec.max_tokens else spec.max_tokens
        use, encode, patches, vision_bytes = taken, 0, 0, 0
        if sample.images:
            image_costs = self.image_costs
            if image_costs.cost is not cost:
                image_costs.restart(cost)
            known = image_costs.known
            for image in sample.images:
                patches += image.patches
                found = known.get(image.patches)
                encode += image_costs.add(image) if found is None else found
            vision_bytes = spec.block_bytes(sample)
            use += vision_bytes << (FIELD_BITS + 1)
            place = 2
            if spec.max_patches is not None:
                use += patches << (place * (FIELD_BITS + 1))
                place += 1
            if spec.max_images is not None:
                use += len(sample.images) << (place * (FIELD_BITS + 1))
        return Load(
            cost.sample_cost(sample), use, sample.position, taken, encode, patches, vision_bytes, sample, due, heavy
        )

    def may_hold(self, load: Load) -> bool:
        """Whether an empty pack has room."""
        return (self.room - load.use) & self.guards == self.guards

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
        """As they are, also those of a row that is longer than a pack."""
        return sum([load.sample.tokens for load in self.loads])

    @property
    def encode(self) -> int:
        return sum([load.encode for load in self.loads])

    @property
    def first_position(self) -> int:
        """Of its oldest sample; empty packs come last."""
        return min((load.position for load in self.loads), default=2**63)
