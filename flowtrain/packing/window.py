"""The rows among which the next step is chosen, and the promise on how long one may wait.

A row enters at step e (the next one to be composed) and is *due* at e + `spec.longest_wait`. The promise, that no row
runs after the step in which it is due, holds by construction, for any wait of at least `spec.wait_steps`:

    rows by (due, position) ──next-fit──▶ packs 0 1 2 … │ K K+1 … │ …      K packs a step (or N rows a step)
                                          step t        │ t+1     │        the layout in which rows would leave
                                                                           if nothing were chosen any more

1. A row is let in while the layout has at most (wait_steps + 1) · K packs, so its place is no later than its due.
2. Before step t is composed: when a row's place is exactly its due (it is *tight*), step t must have all rows of the
   first K packs if some tight row lies behind them, else only those whose due is t. They fit: the layout packs them.
3. Then every row left keeps its promise at t + 1. If the first K packs left, all others move forward by one step. If
   not, no row behind them was tight, so each may move back by one step relative to its due, and taking rows out of a
   next-fit layout never moves a row to a later pack (heavy rows have packs of their own).

When the number of ranks or packs changes between steps, (1) may not hold for rows that are already in; (2) then takes
the oldest first, and the promise holds again for rows that enter afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import FIELD, Caps, Load
from flowtrain.packing.spec import CompositionSpec

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""


@dataclass(slots=True)
class Layout:
    """Steps 1 and 2 of the page: places of rows that leave in order of due.

    `places`: packs opened so far (packs a step given), or rows placed (rows a step given).
    """

    caps: Caps
    num_packs: int | None
    places: int = 0
    _room: int = 0
    _open: int = 0

    def __post_init__(self) -> None:
        # The guard of the tokens is down: there is no open pack with room.
        self._room = self.caps.guards - 1

    def place(self, load: Load) -> int:
        """Number of the load's pack, or its own number."""
        if self.num_packs is None or load.heavy:
            self.places += 1
            return self.places - 1
        left, guards = self._room - load.use, self.caps.guards
        if left & guards != guards:
            left = self.caps.room - load.use
            self._open = self.places
            self.places += 1
        self._room = left
        return self._open

    def count(self, loads: Iterable[Load]) -> None:
        """`place` for each, in less time."""
        if self.num_packs is None:
            self.places += sum(1 for _ in loads)
            return
        left, guards, full, places = self._room, self.caps.guards, self.caps.room, self.places
        for load in loads:
            if load.heavy:
                places += 1
                continue
            left -= load.use
            if left & guards != guards:
                left = full - load.use
                self._open = places
                places += 1
        self._room, self.places = left, places


@dataclass(slots=True)
class Totals:
    """Sums over the window's rows, kept up to date: of all, and of the short ones (see `Window.longest_short`)."""

    cost: int = 0
    use: int = 0
    short_cost: int = 0
    short_tokens: int = 0


@dataclass(slots=True)
class Window:
    """Rows in position order.

    Attributes:
        steps: how many steps of rows the window shall hold.
        bounded: whether the promise is kept; otherwise rows are let in by number alone.
        held: rows that the policy keeps back, which do not count; None when it keeps none.
    """

    spec: CompositionSpec
    caps: Caps
    steps: int
    bounded: bool
    held: Callable[[Load], bool] | None = None
    loads: list[Load] = field(default_factory=list)
    totals: Totals = field(default_factory=lambda: Totals())
    _use: int = 0
    _num_rows: int = 0
    _num_heavy: int = 0
    _target: int = 0
    _target_rows: int = 0
    _most_places: int = 0
    _layout: Layout | None = None
    longest_short: int = 0

    def __post_init__(self) -> None:
        self.longest_short = self.spec.max_tokens // SHORT_SHARE
        if self.spec.num_packs is not None:
            self._target = self.caps.target(self.steps * self.spec.num_packs)
        else:
            self._target_rows = self.steps * self.places_per_step
        self._most_places = (self.spec.wait_steps + 1) * self.places_per_step

    @property
    def places_per_step(self) -> int:
        number = self.spec.num_packs if self.spec.num_packs is not None else self.spec.step_samples
        assert number is not None
        return number

    @property
    def full(self) -> bool:
        """Whether the next row has to wait outside."""
        if not self._target:
            if self._num_rows >= self._target_rows:
                return True
        elif (self._target - self._use) & self.caps.guards != self.caps.guards:
            return True
        layout = self._layout
        if layout is not None:
            return layout.places >= self._most_places
        if not self.bounded or not self.loads:
            return False
        layout = self._layout = Layout(self.caps, self.spec.num_packs)
        layout.count(self.loads)
        # The next row opens one more place at most, and must be let in whatever it is.
        return layout.places >= self._most_places

    @property
    def missing(self) -> int:
        """Rows (or tokens, for a step of packs) that the window lacks while it is not full."""
        if self.spec.step_samples is not None:
            return self.steps * self.spec.step_samples - self._num_rows
        return ((self._target - self._use) & FIELD) + 1

    def add(self, load: Load) -> None:
        self.loads.append(load)
        self._num_heavy += load.heavy
        totals = self.totals
        totals.cost += load.cost
        totals.use += load.use
        if load.tokens <= self.longest_short:
            totals.short_cost += load.cost
            totals.short_tokens += load.tokens
        if self.held is None or not self.held(load):
            self._use += load.use
            self._num_rows += 1
        if self._layout is not None:
            self._layout.place(load)

    def take(self, positions: Collection[int]) -> None:
        """Rows that leave."""
        left, totals, longest_short = [], self.totals, self.longest_short
        for load in self.loads:
            if load.position not in positions:
                left.append(load)
                continue
            totals.cost -= load.cost
            totals.use -= load.use
            self._num_heavy -= load.heavy
            if load.tokens <= longest_short:
                totals.short_cost -= load.cost
                totals.short_tokens -= load.tokens
            if self.held is None or not self.held(load):
                self._use -= load.use
                self._num_rows -= 1
        self.loads, self._layout = left, None

    def recost(self, cost: CostModel) -> None:
        """Costs by another model; what was promised stays."""
        self.loads = [self.caps.load(load.sample, cost, load.due, load.heavy) for load in self.loads]
        self.totals.cost = sum(load.cost for load in self.loads)
        self.totals.short_cost = sum(load.cost for load in self.loads if load.tokens <= self.longest_short)

    def due(self, step: int, early: int = 0) -> tuple[list[Load], list[list[Load]]]:
        """Rows that step `step` must have, and the packs of the layout's first step that show that they fit.

        `early`: rows that are not heavy count as due so many steps before they are.
        """
        ordered = self._by_due(early)
        tight_behind = self._tight_behind(ordered, step, early)
        if not ordered or (not tight_behind and ordered[0].due - (0 if ordered[0].heavy else early) > step):
            return [], []
        chosen: list[Load] = []
        packs: dict[int, list[Load]] = {}
        layout = Layout(self.caps, self.spec.num_packs)
        for load in ordered:
            place = layout.place(load)
            due = load.due if load.heavy else load.due - early
            if place < self.places_per_step and (tight_behind or due <= step):
                chosen.append(load)
                packs.setdefault(place, []).append(load)
        return chosen, list(packs.values())

    def _tight_behind(self, ordered: Sequence[Load], step: int, early: int) -> bool:
        """Whether a row behind the first step of the layout has its place there where it is due, or later.

        Of the rows of one step of the layout, the first is due first, so it alone is looked at.
        """
        per_step = self.places_per_step
        if self.spec.num_packs is None:
            firsts = list(enumerate(ordered[::per_step]))[1:]
            return any(load.due - (0 if load.heavy else early) - step <= level for level, load in firsts)
        left, places, guards, full = self.caps.guards - 1, 0, self.caps.guards, self.caps.room
        for load in ordered:
            if not load.heavy:
                left -= load.use
                if left & guards == guards:
                    continue
                left = full - load.use
            if places and places % per_step == 0:
                due = load.due if load.heavy else load.due - early
                if due - step <= places // per_step:
                    return True
            places += 1
        return False

    def _by_due(self, early: int) -> list[Load]:
        if not self._num_heavy:
            return self.loads
        return sorted(self.loads, key=lambda load: (load.due - (0 if load.heavy else early), load.position))
