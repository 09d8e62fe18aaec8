"""What a sample takes of a pack, and packs in the making.

Every cap of a pack is checked at once: a *use* is one integer that holds a number for each cap side by side, each in a
field of `FIELD_BITS` with a guard bit above it.

    room   1│tokens left │ 1│bytes left │ …        guards set
    use    0│tokens      │ 0│bytes      │ …
    room − use: the guard of a field stays 1 exactly where the use fits, and no field borrows from its neighbour

Samples come by the thousand, so they are made into loads a column at a time (`Loader`).

Invariants: a bin's cost and room are those of its loads; no guard of a room is ever 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add, itemgetter
from typing import Any, NamedTuple, TypeVar

from flowtrain.packing.cost import SHIFT, CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

FIELD_BITS = 52
"""Numbers below 2^52: 4 PiB of features in a whole window."""

FIELD = (1 << FIELD_BITS) - 1

MOST_KNOWN = 1 << 17
"""Lengths, and sizes of features, whose costs and bytes are kept."""

Row = TypeVar("Row", bound=tuple[Any, ...])


class Load(NamedTuple):
    """A sample with what it takes.

    Attributes:
        cost: on the backbone.
        use: of all caps of a pack.
        tokens: of the pack: all of a pack's for a longer sample, which has one to itself.
        encode: its cost on the encoder.
        vision_bytes: of the pool; 0 exactly where there is no image.
    """

    cost: int
    use: int
    position: int
    tokens: int
    encode: int
    vision_bytes: int
    sample: SampleMeta


COST, USE, POSITION, TOKENS, ENCODE, VISION_BYTES, SAMPLE = map(itemgetter, range(len(Load._fields)))


def of_columns(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """NamedTuples whose fields stand in columns: `kind._make` for many, without a call of Python for each."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))


@dataclass(frozen=True, slots=True)
class Caps:
    """Most of a pack, one number a cap. `room` is an empty pack's, guards included."""

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
        total: int = sum(map(USE, loads))
        return max(
            -(-((total >> ((FIELD_BITS + 1) * place)) & FIELD) // max(limit, 1))
            for place, limit in enumerate(self.limits)
        )


class Known(dict[Any, int]):
    """Values of a function by its argument, worked out once: rows come by the thousand, and sizes in few kinds."""

    def __init__(self, function: Callable[[Any], int]) -> None:
        self.function = function

    def __missing__(self, argument: Any) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = self[argument] = self.function(argument)
        return found


class Loader:
    """Samples into loads, by one cost model."""

    def __init__(self, caps: Caps, cost: CostModel) -> None:
        self.caps, self.cost = caps, cost
        self._length_products = Known(cost.length_product)
        self._vision_bytes = Known(lambda sizes: caps.spec.block_bytes(*sizes) if any(sizes) else 0)

    def __call__(self, samples: Sequence[SampleMeta]) -> list[Load]:
        """In their order."""
        return self.fitting(samples)[0]

    def fitting(self, samples: Sequence[SampleMeta]) -> tuple[list[Load], bool]:
        """In their order, and whether a pack can hold any of them, alone."""
        if not samples:
            return [], True
        spec, caps = self.caps.spec, self.caps
        columns = zip(*samples, strict=True)
        positions, _, _, texts, visions, trained, images, _, _, patches, patch_pairs = columns
        lengths = list(map(add, texts, visions))
        tokens = [min(length, spec.max_tokens) for length in lengths] if spec.own_pack else lengths
        vision_bytes = list(map(self._vision_bytes.__getitem__, zip(visions, patches, strict=True)))
        sizes: list[Sequence[int]] = [tokens, vision_bytes]
        if spec.max_patches is not None:
            sizes.append(patches)
        if spec.max_images is not None:
            sizes.append(list(map(len, images)))
        uses = tokens
        for place, column in enumerate(sizes[1:], start=1):
            shift = (FIELD_BITS + 1) * place
            uses = [use + (size << shift) for use, size in zip(uses, column, strict=True)]
        costs, encodes = self._costs(lengths, trained, patches), self._encodes(patches, patch_pairs)
        loads = of_columns(Load, costs, uses, positions, tokens, encodes, vision_bytes, samples)
        return list(loads), all(max(column) <= limit for column, limit in zip(sizes, caps.limits, strict=True))

    def _costs(self, lengths: Sequence[int], trained: Sequence[int], patches: Sequence[int]) -> list[int]:
        """`CostModel.sample_cost` of each."""
        products = map(self._length_products.__getitem__, lengths)
        if self.cost.trained_token:
            products = map(add, products, map(self.cost.trained_token.__mul__, trained))
        if self.cost.projected_patch:
            products = map(add, products, map(self.cost.projected_patch.__mul__, patches))
        return [product >> SHIFT for product in products]

    def _encodes(self, patches: Sequence[int], patch_pairs: Sequence[int]) -> list[int]:
        """`CostModel.encode_cost` of each."""
        patch, patch_pair = self.cost.patch, self.cost.patch_pair
        return [
            (patch * number + patch_pair * pairs) >> SHIFT if number else 0
            for number, pairs in zip(patches, patch_pairs, strict=True)
        ]


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
        return self.loads[0].sample.tokens if len(self.loads) == 1 else sum(map(TOKENS, self.loads))

    @property
    def encode(self) -> int:
        return sum(map(ENCODE, self.loads))

    @property
    def first_position(self) -> int:
        """Of its oldest sample; empty packs come last."""
        return min(map(POSITION, self.loads), default=2**63)
