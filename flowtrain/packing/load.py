"""Single rows as what they take of a pack, the caps of packs, and packs in the making.

Every cap of a pack is checked at once: a *use* is one integer that holds a number for each cap side by side, each in a
field that is as wide as its limit, with a guard bit above it.

    room   1│tokens left │ 1│bytes left │ …        guards set
    use    0│tokens      │ 0│bytes      │ …
    room − use: the guard of a field stays 1 exactly where the use fits, and no field borrows from its neighbour

Invariants: a bin's cost and room are those of its loads; no guard of a room is ever 0; a use is that of a row which an
empty pack can hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

MOST = (1 << 52) - 1
"""Of any number: 4 PiB of features in a whole window."""

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
    """Most of a pack, one number a cap: tokens, bytes of features, then those that are set.

    `room` is an empty pack's, guards included; `shifts`: where the field of each cap begins.
    """

    limits: tuple[int, ...]
    shifts: tuple[int, ...]
    room: int
    guards: int

    @classmethod
    def of(cls, spec: CompositionSpec) -> Caps:
        others = (spec.max_patches, spec.max_images, spec.max_trained_tokens)
        wanted = (spec.max_tokens, spec.max_pack_vision_bytes, *others)
        limits = tuple(min(limit, MOST) for limit in wanted if limit is not None)
        *shifts, _ = accumulate((limit.bit_length() + 1 for limit in limits), initial=0)
        guards = sum(1 << (shift + limit.bit_length()) for shift, limit in zip(shifts, limits, strict=True))
        room = guards + sum(limit << shift for shift, limit in zip(shifts, limits, strict=True))
        return cls(limits, tuple(shifts), room, guards)

    def over(self, sizes: Sequence[Sequence[int]]) -> set[int]:
        """Rows for which an empty pack has no room, by number; `sizes` by cap and row."""
        return {
            number
            for of_cap, limit in zip(sizes, self.limits, strict=True)
            if max(of_cap, default=0) > limit
            for number, size in enumerate(of_cap)
            if size > limit
        }

    def uses(self, sizes: Ints) -> npt.NDArray[Any]:
        """Of each row; `sizes` by cap and row."""
        uses: npt.NDArray[Any] = np.zeros(sizes.shape[1], self._kind)
        for column, shift in zip(sizes.astype(self._kind), self.shifts, strict=True):
            uses += column << shift
        return uses

    def fewest_packs(self, loads: Collection[Load]) -> int:
        """No fewer packs can hold these, by any one cap."""
        sizes = self._fields(np.fromiter(map(USE, loads), self._kind, len(loads)))
        return max(-(-int(size.sum()) // max(limit, 1)) for size, limit in zip(sizes, self.limits, strict=True))

    def rooms_left(self, bins: Iterable[Bin]) -> Ints:
        """By cap and bin."""
        return np.array(self._fields(np.array([pack.room for pack in bins], self._kind)), np.int64)

    def tokens_left(self, pack: Bin) -> int:
        return pack.room & ((1 << self.limits[0].bit_length()) - 1)

    @property
    def _kind(self) -> type:
        """Of an array of uses: Python's integers where 64 bits are too few."""
        return np.int64 if self.room < 1 << 63 else object

    def _fields(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The numbers of each cap, of uses or rooms."""
        return [
            (values >> shift) & ((1 << limit.bit_length()) - 1)
            for shift, limit in zip(self.shifts, self.limits, strict=True)
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
