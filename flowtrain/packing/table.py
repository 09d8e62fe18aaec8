"""What samples take of a pack, a column each: what looks at all rows of a window works on columns.

    samples ──Loader──▶ LoadTable ──loads──▶ single rows (`Load`), for what decides one by one

Invariant: rows stand in position order, so the order of places is that of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np

from flowtrain.packing.cost import SHIFT, CostModel
from flowtrain.packing.load import FIELD_BITS, Bools, Ints, Load, of_columns
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

MOST_KNOWN = 1 << 17
"""Lengths, and sizes of features, whose costs and bytes are kept."""


class LoadTable(NamedTuple):
    """Rows in position order.

    Attributes:
        samples: the rows; every column has a number for each.
        lengths: tokens of the samples as they are.
        costs: on the backbone.
        encodes: costs on the encoder.
        dues: step by which each must run; 0 outside a window.
        heavy: those that alone cost more than a full pack of short ones; none outside a window.
        sizes: by cap and row: tokens (at most those of a pack), bytes of features (0 exactly where there is no image),
            then what other caps count.
    """

    samples: Sequence[SampleMeta]
    positions: Ints
    lengths: Ints
    costs: Ints
    encodes: Ints
    patches: Ints
    dues: Ints
    heavy: Bools
    sizes: Ints

    @classmethod
    def empty(cls, num_caps: int) -> LoadTable:
        none = np.zeros(0, np.int64)
        return cls([], none, none, none, none, none, none, none.astype(np.bool_), np.zeros((num_caps, 0), np.int64))

    @property
    def num_rows(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> Ints:
        column: Ints = self.sizes[0]
        return column

    @property
    def vision_bytes(self) -> Ints:
        column: Ints = self.sizes[1]
        return column

    def part(self, start: int, end: int | None = None) -> LoadTable:
        return LoadTable._make((self.samples[start:end], *(column[..., start:end] for column in self[1:])))

    def where(self, kept: Bools) -> LoadTable:
        samples = list(compress(self.samples, kept.tolist()))
        return LoadTable._make((samples, *(column[..., kept] for column in self[1:])))

    def promised(self, dues: Ints, heavy: Bools) -> LoadTable:
        return self._replace(dues=dues, heavy=heavy)

    def loads(self, places: Ints | None = None) -> list[Load]:
        """The rows at these places, or all."""
        if places is None:
            places = np.arange(self.num_rows)
        sizes = self.sizes[:, places].tolist()
        uses = sizes[0]
        for cap, column in enumerate(sizes[1:], start=1):
            shift = (FIELD_BITS + 1) * cap
            uses = [use + (size << shift) for use, size in zip(uses, column, strict=True)]
        costs, positions, encodes = (column[places].tolist() for column in (self.costs, self.positions, self.encodes))
        numbers = places.tolist()
        samples = map(self.samples.__getitem__, numbers)
        return list(of_columns(Load, costs, uses, positions, sizes[0], encodes, numbers, samples))


def joined(tables: Sequence[LoadTable]) -> LoadTable:
    """One table of all rows; a table that is alone is given back as it is."""
    if len(tables) == 1:
        return tables[0]
    samples, *columns = zip(*tables, strict=True)
    return LoadTable._make((list(chain.from_iterable(samples)), *(np.concatenate(rows, axis=-1) for rows in columns)))


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
    """Samples into tables, by one cost model."""

    def __init__(self, spec: CompositionSpec, cost: CostModel) -> None:
        self.spec, self.cost = spec, cost
        self._length_products = Known(cost.length_product)
        self._vision_bytes = Known(lambda sizes: spec.block_bytes(*sizes) if any(sizes) else 0)

    def __call__(self, samples: Sequence[SampleMeta]) -> LoadTable:
        """In their order."""
        spec, num = self.spec, len(samples)
        columns = zip(*samples, strict=True) if samples else repeat((), len(SampleMeta._fields))
        positions, _, _, texts, visions, trained, images, _, _, patches, patch_pairs = columns
        lengths = list(map(add, texts, visions))
        sizes: list[Sequence[int]] = [
            [min(length, spec.max_tokens) for length in lengths] if spec.own_pack else lengths,
            list(map(self._vision_bytes.__getitem__, zip(visions, patches, strict=True))),
        ]
        if spec.max_patches is not None:
            sizes.append(patches)
        if spec.max_images is not None:
            sizes.append(list(map(len, images)))
        costs, encodes = self._costs(lengths, trained, patches), self._encodes(patches, patch_pairs)
        known = np.array([positions, lengths, costs, encodes, patches, *sizes], np.int64)
        dues, heavy = np.zeros(num, np.int64), np.zeros(num, np.bool_)
        return LoadTable._make((samples, *known[:5], dues, heavy, known[5:]))

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
