"""Single rows as what they take of a pack, the caps of packs, and packs in the making.

Every cap of a pack is checked at once: a *use* is one integer that holds a number for each cap side by side, each in a
field of `FIELD_BITS` with a guard bit above it.

    room   1│tokens left │ 1│bytes left │ …        guards set
    use    0│tokens      │ 0│bytes      │ …
    room − use: the guard of a field stays 1 exactly where the use fits, and no field borrows from its neighbour

Invariants: a bin's cost and room are those of its loads; no guard of a room is ever 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

FIELD_BITS = 52
"""Numbers below 2^52: 4 PiB of features in a whole window."""

FIELD = (1 << FIELD_BITS) - 1

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Row = TypeVar("Row", bound=tuple[Any, ...])


class Load(NamedTuple):
    """A sample with what it takes.

    Attributes:
        cost: on the backbone.
        use: of all caps of a pack.
        tokens: of the pack: all of a pack's for a longer sample, which has one to itself.
        encode: its cost on the encoder.
        place: in the table that it is of.
    """

    cost: int
    use: int
    position: int
    tokens: int
    encode: int
    place: int
    sample: SampleMeta


COST, USE, POSITION, TOKENS, ENCODE, PLACE = map(itemgetter, range(6))


def of_columns(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """NamedTuples whose fields stand in columns: `kind._make` for many, without a call of Python for each."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))


@dataclass(frozen=True, slots=True)
class Caps:
    """Most of a pack, one number a cap: tokens, bytes of features, then those that are set. `room` is an empty pack's,
    guards included."""

    limits: tuple[int, ...]
    room: int
    guards: int

    @classmethod
    def of(cls, spec: CompositionSpec) -> Caps:
        wanted = (spec.max_tokens, spec.max_pack_vision_bytes, spec.max_patches, spec.max_images)
        limits = tuple(min(limit, FIELD) for limit in wanted if limit is not None)
        guards = sum(1 << ((FIELD_BITS + 1) * place + FIELD_BITS) for place in range(len(limits)))
        room = guards + sum(limit << ((FIELD_BITS + 1) * place) for place, limit in enumerate(limits))
        return cls(limits, room, guards)

    def hold(self, sizes: Ints) -> Bools:
        """Of each row, whether an empty pack has room; `sizes` by cap and row."""
        fits: Bools = np.all(np.array(self.limits) >= sizes.T, axis=1)
        return fits

    def fewest_packs(self, loads: Iterable[Load]) -> int:
        """No fewer packs can hold these, by any one cap."""
        total: int = sum(map(USE, loads))
        return max(-(-used // max(limit, 1)) for used, limit in zip(self._fields(total), self.limits, strict=True))

    def rooms_left(self, bins: Iterable[Bin]) -> Ints:
        """By cap and bin."""
        return np.array([self._fields(pack.room) for pack in bins], np.int64).T

    def _fields(self, value: int) -> list[int]:
        return [(value >> ((FIELD_BITS + 1) * place)) & FIELD for place in range(len(self.limits))]


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
