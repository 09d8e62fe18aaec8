"""The rows among which the next step is chosen, and the promise on how long one may wait.

A row enters at step e (the next one to be composed) and is *due* at e + wait, wait being `spec.wait_steps`, twice that
for heavy rows. The promise, that no row runs after the step in which it is due, holds by construction:

    rows by (due, position) ──next-fit──▶ packs 0 1 2 … │ K K+1 … │ …      K packs a step (or N rows a step)
                                          step t        │ t+1     │        the layout in which rows would leave
                                                                           if nothing were chosen any more

1. A row is let in while the layout has at most (wait + 1) · K packs, so every row's place is no later than its due.
2. Before step t is composed: when a row's place is exactly its due (it is *tight*), step t must have all rows of the
   first K packs if some tight row lies behind them, else only those whose due is t. They fit: the layout packs them.
3. Then every row left keeps its promise at t + 1. If the first K packs left, all others move forward by one step. If
   not, no row behind them was tight, so each may move back by one step relative to its due, and taking rows out of a
   next-fit layout never moves a row to a later pack (heavy rows have packs of their own).

When the number of ranks or packs changes between steps, (1) may not hold for rows that are already in; (2) then takes
the oldest first, and the promise holds again for rows that enter afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import FIELD, Caps, Load
from flowtrain.packing.spec import CompositionSpec


@dataclass(slots=True)
class Layout:
    """Step 1 and 2 of the page: places of rows that leave in order of due."""

    caps: Caps
    num_packs: int | None
    num_rows: int | None
    places: int = 0
    """Packs opened so far, or rows placed."""
    _room: int = -1
    _open: int = -1

    def place(self, load: Load) -> int:
        """Number of the load's pack (packs a step given), or its own number (rows a step given)."""
        if self.num_packs is None:
            self.places += 1
            return self.places - 1
        if load.heavy:
            self.places += 1
            return self.places - 1
        left = self._room - load.use
        if self._room < 0 or left & self.caps.guards != self.caps.guards:
            left = self.caps.room - load.use
            self._open = self.places
            self.places += 1
        self._room = left
        return self._open

    @property
    def places_per_step(self) -> int:
        number = self.num_packs if self.num_packs is not None else self.num_rows
        assert number is not None
        return number


@dataclass(slots=True)
class Window:
    """Rows in position order. `held`: rows that the policy keeps back, which do not count; `steps`: how many steps of
    rows the window shall hold; `bounded`: whether the promise is kept (otherwise rows are let in by number alone)."""

    spec: CompositionSpec
    caps: Caps
    steps: int
    bounded: bool
    held: Callable[[Load], bool]
    loads: list[Load] = field(default_factory=list)
    _use: int = 0
    _num_rows: int = 0
    _target: int = 0
    _layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.spec.num_packs is not None:
            self._target = self.caps.target(self.steps * self.spec.num_packs)

    @property
    def full(self) -> bool:
        """Whether the next row has to wait outside."""
        if self.missing <= 0:
            return True
        if not self.bounded or not self.loads:
            return False
        if self._layout is None:
            self._layout = self._new_layout()
            for load in self.loads:
                self._layout.place(load)
        # The next row opens one more place at most, and must be let in whatever it is.
        return self._layout.places >= (self.spec.wait_steps + 1) * self._layout.places_per_step

    @property
    def missing(self) -> int:
        """Rows (or tokens, for a step of packs) that the window lacks; any cap may fill it."""
        spec = self.spec
        if spec.step_samples is not None:
            return self.steps * spec.step_samples - self._num_rows
        left = self._target - self._use
        if left & self.caps.guards != self.caps.guards:
            return 0
        return (left & FIELD) + 1

    def add(self, load: Load) -> None:
        self.loads.append(load)
        self._count(load, 1)
        if self._layout is not None:
            self._layout.place(load)

    def take(self, positions: Collection[int]) -> None:
        """Rows that leave."""
        left = []
        for load in self.loads:
            if load.position in positions:
                self._count(load, -1)
            else:
                left.append(load)
        self.loads, self._layout = left, None

    def recost(self, cost: CostModel) -> None:
        """Costs by another model; what was promised stays."""
        self.loads = [self.caps.load(load.sample, cost, load.due, load.heavy) for load in self.loads]

    def due(self, step: int) -> tuple[list[Load], list[list[Load]]]:
        """Rows that step `step` must have, and the packs of the layout's first step that show that they fit."""
        layout = self._new_layout()
        per_step = layout.places_per_step
        first: list[tuple[int, Load]] = []
        tight_behind = False
        now: list[Load] = []
        for load in self._by_due():
            place = layout.place(load)
            if place < per_step:
                first.append((place, load))
                if load.due <= step:
                    now.append(load)
            elif place // per_step >= load.due - step:
                tight_behind = True
        chosen = [load for _, load in first] if tight_behind else now
        packs: dict[int, list[Load]] = {}
        if chosen:
            wanted = {load.position for load in chosen}
            for place, load in first:
                if load.position in wanted:
                    packs.setdefault(place, []).append(load)
        return chosen, list(packs.values())

    def _by_due(self) -> list[Load]:
        if all(before.due <= after.due for before, after in zip(self.loads, self.loads[1:], strict=False)):
            return self.loads
        return sorted(self.loads, key=lambda load: (load.due, load.position))

    def _new_layout(self) -> Layout:
        return Layout(self.caps, self.spec.num_packs, self.spec.step_samples)

    def _count(self, load: Load, sign: int) -> None:
        if not self.held(load):
            self._use += sign * load.use
            self._num_rows += sign
