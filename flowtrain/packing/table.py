"""What samples take of a pack, a column each: what looks at all rows of a window works on columns.

    samples ──Loader──▶ LoadTable ──loads──▶ single rows (`Load`), for what decides one by one

Invariant: rows stand in position order, so the order of places is that of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import Bools, Caps, Ints, Load, of_columns
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

MOST_KNOWN = 1 << 17
"""Sizes of features whose bytes are kept."""


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
        uses: of all caps (`Caps.uses`).
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
    uses: npt.NDArray[Any]

    @classmethod
    def empty(cls, caps: Caps) -> LoadTable:
        none, sizes = np.zeros(0, np.int64), np.zeros((len(caps.limits), 0), np.int64)
        return cls([], none, none, none, none, none, none, none.astype(np.bool_), sizes, caps.uses(sizes))

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

    def at(self, places: Ints) -> LoadTable:
        """The rows at these places, in their order, which need not be that of positions."""
        samples = list(map(self.samples.__getitem__, places.tolist()))
        return LoadTable._make((samples, *(column[..., places] for column in self[1:])))

    def promised(self, dues: Ints, heavy: Bools) -> LoadTable:
        return self._replace(dues=dues, heavy=heavy)

    def loads(self, places: Ints | None = None) -> list[Load]:
        """The rows at these places, or all."""
        if places is None:
            places = np.arange(self.num_rows)
        costs, uses, positions, tokens, encodes = (
            column[places].tolist() for column in (self.costs, self.uses, self.positions, self.tokens, self.encodes)
        )
        numbers = places.tolist()
        samples = map(self.samples.__getitem__, numbers)
        return list(of_columns(Load, costs, uses, positions, tokens, encodes, numbers, samples))


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
        self.spec, self.cost, self.caps = spec, cost, Caps.of(spec)
        self._vision_bytes = Known(lambda sizes: spec.block_bytes(*sizes) if any(sizes) else 0)

    def __call__(self, samples: Sequence[SampleMeta], sizes: Sequence[Sequence[int]] | Ints | None = None) -> LoadTable:
        """In their order; each must fit an empty pack. `sizes`: what `sizes` gave, or a table has, of them."""
        if sizes is None:
            sizes = self.sizes(samples)
        positions, _, _, texts, visions, trained, _, _, _, patches, pairs = _columns(samples)
        known, by_cap = np.array([positions, trained, patches, pairs], np.int64), np.array(sizes, np.int64)
        # The tokens of a pack that a row takes are all of its own, but for one that is longer than a pack.
        lengths = np.array(list(map(add, texts, visions)), np.int64) if self.spec.own_pack else by_cap[0]
        costs = self.cost.sample_costs(lengths, known[1], known[2])
        encodes = self.cost.encode_costs(known[2], known[3])
        dues, heavy = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.bool_)
        uses = self.caps.uses(by_cap)
        return LoadTable(samples, known[0], lengths, costs, encodes, known[2], dues, heavy, by_cap, uses)

    def sizes(self, samples: Sequence[SampleMeta]) -> list[list[int]]:
        """By cap and sample, as in a table."""
        spec = self.spec
        _, _, _, texts, visions, trained, images, _, _, patches, _ = _columns(samples)
        lengths = list(map(add, texts, visions))
        sizes = [
            [min(length, spec.max_tokens) for length in lengths] if spec.own_pack else lengths,
            list(map(self._vision_bytes.__getitem__, zip(visions, patches, strict=True))),
        ]
        if spec.max_patches is not None:
            sizes.append(list(patches))
        if spec.max_images is not None:
            sizes.append(list(map(len, images)))
        if spec.max_trained_tokens is not None:
            sizes.append(list(trained))
        return sizes


def _columns(samples: Sequence[SampleMeta]) -> Iterable[tuple[Any, ...]]:
    return zip(*samples, strict=True) if samples else repeat((), len(SampleMeta._fields))
