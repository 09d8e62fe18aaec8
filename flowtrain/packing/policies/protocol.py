"""What a policy is asked for, and what it gives.

    Window ──Draw──▶ Policy.compose ──▶ packs by slot and rank     rows left out are carried to the next step

A policy takes exactly `num_rows` rows (all that are left when there are fewer), or makes exactly `num_packs` packs.
It keeps the caps of every pack and takes at least one row. Where `bounded`, it takes every row of `draw.due`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import Bin, Bools, Caps, Ints, Load
from flowtrain.packing.spec import CompositionSpec
from flowtrain.packing.table import LoadTable

Slots = list[list[Bin]]
"""`slots[slot][rank]`."""


@dataclass(frozen=True, slots=True)
class Due:
    """Rows that a step must have, in packs that hold them, within the caps and no more than the step has."""

    packs: Sequence[Sequence[Load]] = ()

    @property
    def loads(self) -> list[Load]:
        return list(chain.from_iterable(self.packs))


@dataclass(frozen=True)
class Draw:
    """One step to be composed.

    Attributes:
        rows: the window, in position order; never empty.
        spec, cost, caps: the rules.
        due: rows that must be in this step.
        early: rows that should be, since they have waited for the usual bound.
        last: whether no rows will come beside these.
    """

    rows: LoadTable
    spec: CompositionSpec
    cost: CostModel
    caps: Caps
    due: Due = Due()
    early: Due = Due()
    last: bool = False

    @cached_property
    def loads(self) -> list[Load]:
        """All rows."""
        return self.rows.loads()

    @property
    def num_ranks(self) -> int:
        return self.spec.num_consumers

    @property
    def num_packs(self) -> int | None:
        return self.spec.num_packs

    @property
    def num_rows(self) -> int | None:
        """Rows of this step, where they are given."""
        return None if self.spec.step_samples is None else min(self.spec.step_samples, self.rows.num_rows)

    def empty_pack(self) -> Bin:
        return Bin(self.caps.room)


class Policy(Protocol):
    """One way to compose. `bounded`: whether it keeps the promise on waiting (`flowtrain.packing.window`).

    A policy says `compose`; the rest is that of one which looks at the rows of one step.
    """

    bounded: bool = False

    def steps_ahead(self, spec: CompositionSpec) -> int:
        """Steps of rows that it looks at."""
        return 1

    def held(self, spec: CompositionSpec) -> Callable[[Ints], Bools] | None:
        """Tells of rows, by their tokens, which may wait in a queue beside the window; None where none may."""
        return None

    @abstractmethod
    def compose(self, draw: Draw) -> Slots:
        """The packs of one step."""
