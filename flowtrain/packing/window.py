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

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import FIELD, Caps, Load
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta, SkippedRow

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""


COST, USE, POSITION, TOKENS, DUE, HEAVY = (
    itemgetter(Load._fields.index(name)) for name in ("cost", "use", "position", "tokens", "due", "heavy")
)


@dataclass(slots=True)
class Layout:
    """Steps 1 and 2 of the page, for rows in order of due.

    `places`: packs opened so far (packs a step given), or rows placed (rows a step given). `starts`: number of the row
    with which each pack began, as long as no row is heavy.
    """

    caps: Caps
    num_packs: int | None
    places: int = 0
    starts: list[int] = field(default_factory=list)
    room: int = 0
    _open: int = 0

    def __post_init__(self) -> None:
        # The guard of the tokens is down: there is no open pack with room.
        self.room = self.caps.guards - 1

    def place(self, load: Load) -> int:
        """Number of the load's pack, or its own number."""
        if self.num_packs is None or load.heavy:
            self.places += 1
            return self.places - 1
        left, guards = self.room - load.use, self.caps.guards
        if left & guards != guards:
            left = self.caps.room - load.use
            self._open = self.places
            self.places += 1
        self.room = left
        return self._open

    def lay(self, loads: Sequence[Load]) -> None:
        """`place` for all of these, none of them heavy and none placed before; a pack at a time."""
        if self.num_packs is None:
            self.places = len(loads)
            return
        if not loads:
            return
        full, guards, limit = self.caps.room, self.caps.guards, self.caps.limits[0]
        uses = list(accumulate(map(USE, loads), initial=0))
        tokens = [use & FIELD for use in uses]
        starts, at, num_loads = self.starts, 0, len(loads)
        while at < num_loads:
            starts.append(at)
            base = uses[at]
            end = bisect_right(tokens, tokens[at] + limit, at + 1) - 1
            while (full - (uses[end] - base)) & guards != guards:
                end -= 1
            at = end
        self.room = full - (uses[at] - uses[starts[-1]])
        self.places = len(starts)
        self._open = self.places - 1


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
    totals: Totals = field(default_factory=Totals)
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
        # The next row opens one more place at most, and must be let in whatever it is.
        return self.bounded and self._laid().places >= self._most_places

    def _laid(self) -> Layout:
        """The layout of the window's rows in position order, which is that of due where none is heavy."""
        layout = self._layout
        if layout is None:
            layout = self._layout = Layout(self.caps, self.spec.num_packs)
            if self._num_heavy:
                for load in self.loads:
                    layout.place(load)
            else:
                layout.lay(self.loads)
        return layout

    @property
    def missing(self) -> int:
        """Rows (or tokens, for a step of packs) that the window lacks while it is not full."""
        if self.spec.step_samples is not None:
            return self.steps * self.spec.step_samples - self._num_rows
        return ((self._target - self._use) & FIELD) + 1

    def add(self, load: Load) -> None:
        """A row, whether the window is full or not."""
        self._count([load], 1)
        self.loads.append(load)
        self._layout = None

    def fill(self, waiting: deque[SampleMeta | SkippedRow], load_of: Callable[[SampleMeta], Load], cursor: int) -> int:
        """Rows in until the window is full or none waits; returns the position behind the last one read, or `cursor`.

        `full`, `add` and `Layout.place` in one loop.
        """
        if not waiting or self.full:
            return cursor
        layout = self._laid() if self.bounded else Layout(self.caps, self.spec.num_packs)
        guards, target, most, most_rows = self.caps.guards, self._target, self._most_places, self._target_rows
        held, packed, empty = self.held, self.spec.num_packs is not None and self.bounded, self.caps.room
        use, num_rows, room, places = self._use, self._num_rows, layout.room, layout.places
        loads, starts, before = self.loads, layout.starts, len(self.loads)
        while waiting:
            row = waiting.popleft()
            cursor = row.position + 1
            if isinstance(row, SkippedRow):
                continue
            load = load_of(row)
            takes = load.use
            if held is None or not held(load):
                use += takes
                num_rows += 1
            if packed and not load.heavy:
                room -= takes
                if room & guards != guards:
                    room = empty - takes
                    places += 1
                    starts.append(len(loads))
            else:
                places += 1
            loads.append(load)
            # Rows that are held stay within `num_rows`; a window that is not bounded has no places to run out of.
            if (target - use) & guards != guards if target else num_rows >= most_rows:
                break
            if places >= most and self.bounded:
                break
        layout.room, layout.places = room, places
        self._use, self._num_rows = use, num_rows
        new = loads[before:]
        self._count(new, 1, held=False)
        return cursor

    def take(self, taken: Sequence[Load]) -> None:
        """Rows that leave."""
        positions = set(map(POSITION, taken))
        self._count(taken, -1)
        self.loads = [load for load in self.loads if load.position not in positions]
        self._layout = None

    def _count(self, loads: Sequence[Load], sign: int, held: bool = True) -> None:
        """The sums with these rows more, or less; `held`: also those without rows that the policy keeps back."""
        totals, longest_short = self.totals, self.longest_short
        use = sum(map(USE, loads))
        short = [load for load in loads if load.tokens <= longest_short]
        totals.cost += sign * sum(map(COST, loads))
        totals.use += sign * use
        totals.short_cost += sign * sum(map(COST, short))
        totals.short_tokens += sign * sum(map(TOKENS, short))
        self._num_heavy += sign * sum(map(HEAVY, loads))
        if held and self.held is not None:
            kept = self.held
            loads = [load for load in loads if not kept(load)]
            use = sum(map(USE, loads))
        if held:
            self._use += sign * use
            self._num_rows += sign * len(loads)

    def recost(self, cost: CostModel) -> None:
        """Costs by another model; what was promised stays."""
        load_of = self.caps.loader(cost)
        self.loads = [load_of(load.sample, load.due, load.heavy) for load in self.loads]
        self.totals.cost = sum(load.cost for load in self.loads)
        self.totals.short_cost = sum(load.cost for load in self.loads if load.tokens <= self.longest_short)

    def due(self, step: int, early: int = 0) -> tuple[Sequence[Load], Sequence[Sequence[Load]]]:
        """Rows that step `step` must have, and the packs of the layout's first step that show that they fit.

        `early`: rows that are not heavy count as due so many steps before they are.
        """
        loads, per_step = self.loads, self.places_per_step
        if self._num_heavy:
            return self._due_by_row(step, early)
        if not loads:
            return [], []
        starts = range(len(loads)) if self.spec.num_packs is None else self._laid().starts
        # Of the rows of one step of the layout, the first is due first, so it alone is looked at.
        firsts = enumerate(starts[per_step::per_step], start=1)
        tight_behind = any(loads[first].due - early - step <= level for level, first in firsts)
        if not tight_behind and loads[0].due - early > step:
            return [], []
        ends = [*starts[1 : per_step + 1], len(loads)][:per_step]
        packs = [loads[start:end] for start, end in zip(starts, ends, strict=False)]
        if not tight_behind:
            packs = [kept for pack in packs if (kept := [load for load in pack if load.due - early <= step])]
        return list(chain.from_iterable(packs)), packs

    def _due_by_row(self, step: int, early: int) -> tuple[Sequence[Load], Sequence[Sequence[Load]]]:
        """`due` where some rows are heavy and the order of due is not that of positions."""
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
        """Whether a row behind the first step of the layout has its place there where it is due, or later."""
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
        return sorted(self.loads, key=lambda load: (load.due - (0 if load.heavy else early), load.position))
