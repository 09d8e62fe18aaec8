"""What a sample takes of a pack, and packs in the making.

Every cap of a pack is checked at once: a *use* is one integer that holds a number for each cap side by side, each in a
field of `FIELD_BITS` with a guard bit above it.

    room   1│tokens left │ 1│bytes left │ …        guards set
    use    0│tokens      │ 0│bytes      │ …
    room − use: the guard of a field stays 1 exactly where the use fits, and no field borrows from its neighbour

Invariants: a bin's cost and room are those of its loads; no guard of a room is ever 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.packing.cost import SHIFT, CostModel
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


class ImageCosts(dict[int, int]):
    """Costs of images by their patches, of which there are few: rows come by the thousand."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def __missing__(self, patches: int) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = self[patches] = self.cost.image_cost(ImageMeta(0, 0, 0, patches))
        return found


class LengthCosts(dict[int, int]):
    """What a sample costs by its length alone, as a product with the model's coefficients that is not yet shifted."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def __missing__(self, tokens: int) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = self[tokens] = (self.cost.token + self.cost.token_pair * tokens) * tokens
        return found


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

    def load(self, sample: SampleMeta, cost: CostModel, due: int = 0, heavy: bool = False) -> Load:
        """What a sample takes; a row of its own pack takes all the tokens there are."""
        return self.loader(cost)(sample, due, heavy)

    def loader(self, cost: CostModel) -> Callable[[SampleMeta, int, bool], Load]:
        """`load` for many rows: what is the same for all of them is looked up once."""
        spec, block_bytes, max_tokens = self.spec, self.spec.block_bytes, self.spec.max_tokens
        lengths, known = LengthCosts(cost), ImageCosts(cost)
        trained_token, projected_patch = cost.trained_token, cost.projected_patch
        bytes_at = FIELD_BITS + 1
        patches_at = 2 * bytes_at if spec.max_patches is not None else None
        images_at = (2 + (patches_at is not None)) * bytes_at if spec.max_images is not None else None
        new = tuple.__new__

        def load(sample: SampleMeta, due: int, heavy: bool) -> Load:
            tokens = sample.text_tokens + sample.vision_tokens
            taken = tokens if tokens <= max_tokens else max_tokens
            use, encode, patches, vision_bytes, cost_of = taken, 0, 0, 0, lengths[tokens]
            if images := sample.images:
                for image in images:
                    size = image.patches
                    patches += size
                    encode += known[size]
                vision_bytes = block_bytes(sample)
                use += vision_bytes << bytes_at
                if patches_at is not None:
                    use += patches << patches_at
                if images_at is not None:
                    use += len(images) << images_at
                if projected_patch:
                    cost_of += projected_patch * patches
            if trained_token:
                cost_of += trained_token * sample.trained_tokens
            cost_of >>= SHIFT
            return new(Load, (cost_of, use, sample.position, taken, encode, patches, vision_bytes, sample, due, heavy))

        return load

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
        tokens = sum([load.tokens for load in self.loads])
        return tokens if len(self.loads) != 1 else self.loads[0].sample.tokens

    @property
    def encode(self) -> int:
        return sum([load.encode for load in self.loads])

    @property
    def first_position(self) -> int:
        """Of its oldest sample; empty packs come last."""
        return min((load.position for load in self.loads), default=2**63)
