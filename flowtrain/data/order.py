"""The run's one global order of rows: position → row, by arithmetic, for every epoch.

    position p ──▶ epoch = p // num_rows, place = p % num_rows ──▶ row = permutation(seed, epoch)(place)

The permutation is a Feistel network on the smallest even number of bits that holds `num_rows`, walked along its cycle
until it lands below `num_rows`. Any position is answered alone, in constant time and memory, so a reader needs no table
of ten million rows, and a resumed run none of the positions before it.

Invariants: within an epoch every row appears exactly once; nothing but (num_rows, seed, shuffle) matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowtrain.config.schema import Config
    from flowtrain.types import Row

_MASK = (1 << 64) - 1
_ROUNDS = 8


def _mix(value: int) -> int:
    """A 64-bit finaliser (the constants of SplitMix64): every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Order:
    """`row(position)` for positions from 0; epochs follow each other without end.

    >>> order = Order(num_rows=3, seed=0)
    >>> sorted(order.row(position) for position in range(3))
    [0, 1, 2]
    """

    num_rows: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.num_rows > 0, "an order needs at least one row"

    @classmethod
    def of(cls, config: Config, num_rows: int) -> Order:
        """Of the training rows of a run."""
        return cls(num_rows, config.run.seed, config.data.shuffle)

    def epoch(self, position: int) -> int:
        return position // self.num_rows

    def row(self, position: int) -> int:
        assert position >= 0, position
        epoch, place = divmod(position, self.num_rows)
        if not self.shuffle or self.num_rows == 1:
            return place
        half_bits = max(1, ((self.num_rows - 1).bit_length() + 1) // 2)
        key = _mix(_mix(self.seed & _MASK) ^ epoch)
        place = _permute(place, half_bits, key)
        while place >= self.num_rows:
            place = _permute(place, half_bits, key)
        return place

    def rows(self, known: Sequence[Row], start: int = 0) -> Iterator[Row]:
        """As a run reads them from position `start` on, epochs without end; `known`: each row of the file, such as its
        scan has them. Positions are those of the run."""
        assert len(known) == self.num_rows, (len(known), self.num_rows)
        for position in count(start):
            yield known[self.row(position)]._replace(position=position)


def _permute(value: int, half_bits: int, key: int) -> int:
    """A bijection of [0, 4**half_bits)."""
    low_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & low_mask
    for index in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ _mix((right << 8) | index)) & low_mask)
    return (left << half_bits) | right
