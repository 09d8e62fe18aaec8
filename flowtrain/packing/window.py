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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, repeat

from flowtrain.packing.load import COST, FIELD, POSITION, TOKENS, USE, Bin, Caps, Load, Loader
from flowtrain.packing.spec import CompositionSpec

SHORT_SHARE = 4
"""A row is short when this many of it fit a pack."""


@dataclass(slots=True)
class Layout:
    """Next-fit of rows in order, none of them heavy, as long as rows only come.

    `starts`: number of the row with which each pack begins (packs a step given), or all numbers (rows a step given).
    """

    caps: Caps
    num_packs: int | None
    starts: list[int] = field(default_factory=list)
    num_rows: int = 0
    room: int = 0
    """Of the last pack."""

    def __post_init__(self) -> None:
        # No pack is open yet: one that is full stands for it, since every row has a token.
        self.room = self.caps.guards

    def lay(self, loads: Sequence[Load]) -> None:
        """The next rows, a pack at a time."""
        first = self.num_rows
        self.num_rows += len(loads)
        if self.num_packs is None:
            self.starts.extend(range(first, self.num_rows))
            return
        full, guards, limit = self.caps.room, self.caps.guards, self.caps.limits[0]
        used = full - self.room
        uses = list(accumulate(map(USE, loads), initial=used))
        tokens = list(accumulate(map(TOKENS, loads), initial=used & FIELD))
        begun, begun_tokens = 0, 0
        while True:
            end = bisect_right(tokens, begun_tokens + limit) - 1
            while (full - (uses[end] - begun)) & guards != guards:
                end -= 1
            if end == len(loads):
                break
            self.starts.append(first + end)
            begun, begun_tokens = uses[end], tokens[end]
        self.room = full - (uses[end] - begun)


@dataclass(slots=True)
class Totals:
    """Sums over rows: of all, and of the long ones (see `Window.longest_short`)."""

    num_rows: int = 0
    cost: int = 0
    use: int = 0
    long_cost: int = 0
    long_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.use & FIELD

    def count(self, loads: Sequence[Load], longest_short: int, sign: int, cost: int, use: int) -> None:
        """With these rows more, or less, which together have this cost and use."""
        long = [load for load in loads if load.tokens > longest_short]
        self.num_rows += sign * len(loads)
        self.cost += sign * cost
        self.use += sign * use
        self.long_cost += sign * sum(map(COST, long))
        self.long_tokens += sign * sum(map(TOKENS, long))


class Window:
    """Rows in position order.

    Args:
        steps: how many steps of rows the window shall hold.
        bounded: whether the promise is kept; otherwise rows are let in by number alone.
        held: rows that the policy keeps back, which do not count; None when it keeps none.
    """

    def __init__(
        self,
        spec: CompositionSpec,
        caps: Caps,
        steps: int,
        bounded: bool,
        held: Callable[[Load], bool] | None = None,
    ) -> None:
        self.spec, self.caps, self.bounded, self.held = spec, caps, bounded, held
        self.longest_short = spec.max_tokens // SHORT_SHARE
        self.totals = Totals()
        self.due_of: dict[int, int] = {}
        """Step in which the row of each position is due."""
        self.heavy: set[int] = set()
        """Positions of rows that alone cost more than a full pack of short ones."""
        self._rows: dict[int, Load] = {}
        self._listed: list[Load] | None = None
        self._layout: Layout | None = None
        self._most_places = (spec.wait_steps + 1) * self.places_per_step
        self._target = steps * self.places_per_step
        if spec.num_packs is not None:
            self._target = caps.target(self._target)

    @property
    def loads(self) -> list[Load]:
        if self._listed is None:
            self._listed = list(self._rows.values())
        return self._listed

    @property
    def places_per_step(self) -> int:
        number = self.spec.num_packs if self.spec.num_packs is not None else self.spec.step_samples
        assert number is not None
        return number

    @property
    def full(self) -> bool:
        """Whether the next row has to wait outside."""
        # The next row opens one more place at most, and must be let in whatever it is.
        return self._enough(self._amount) or (self.bounded and self._places >= self._most_places)

    @property
    def missing(self) -> int:
        """Rows (or tokens, for a step of packs) that the window lacks while it is not full."""
        if self.spec.num_packs is None:
            return self._target - self._amount
        return ((self._target - self._amount) & FIELD) + 1

    def add(self, load: Load, due: int, heavy: bool) -> None:
        """A row of an earlier window, whether this one is full or not."""
        self._enter([load], due, load.use)
        if heavy:
            self.heavy.add(load.position)
        self._layout = None

    def fill(self, waiting: Sequence[Load], due: int, heavy: Set[int], heavy_due: int) -> int:
        """Rows in until the window is full or none waits; returns how many.

        `heavy`: positions of those that are, which are due at `heavy_due`, the others at `due`.
        """
        amounts = list(accumulate(self._amounts(waiting), initial=self._amount))
        num = min(bisect_left(amounts, True, key=self._enough), len(waiting))
        if self.bounded:
            num = self._lay(waiting[:num], heavy)
        entered = waiting[:num]
        self._enter(entered, due, sum(map(USE, entered)))
        for position in (load.position for load in entered if load.position in heavy) if heavy else ():
            self.heavy.add(position)
            self.due_of[position] = heavy_due
        return num

    def take(self, packs: Sequence[Bin]) -> None:
        """Rows that leave, those of these packs."""
        taken = list(chain.from_iterable(pack.loads for pack in packs))
        for position in map(POSITION, taken):
            del self._rows[position], self.due_of[position]
        self.heavy &= self._rows.keys()
        cost, use = sum(pack.cost for pack in packs), sum(self.caps.room - pack.room for pack in packs)
        self.totals.count(taken, self.longest_short, -1, cost, use)
        self._listed = self._layout = None

    def recost(self, loader: Loader) -> None:
        """Costs by another model; what was promised stays."""
        loads = loader([load.sample for load in self.loads])
        use, self.totals = self.totals.use, Totals()
        self._rows = dict(zip(self._rows, loads, strict=True))
        self._listed = loads
        self.totals.count(loads, self.longest_short, 1, sum(map(COST, loads)), use)

    def due(self, step: int, early: int = 0) -> tuple[Sequence[Load], Sequence[Sequence[Load]]]:
        """Rows that step `step` must have, and the packs of the layout's first step that show that they fit.

        `early`: rows that are not heavy count as due so many steps before they are.
        """
        if not self._rows:
            return [], []
        due_of, heavy, per_step = self.due_of, self.heavy, self.places_per_step

        def when(load: Load) -> int:
            return due_of[load.position] - (0 if load.position in heavy else early)

        packs = self._packs(when)
        # Of the rows of a pack, and of the packs of a step, the first is due first, so it alone is looked at.
        levels = enumerate(packs[per_step::per_step], start=1)
        tight_behind = any(when(pack[0]) - step <= level for level, pack in levels)
        if not tight_behind and when(packs[0][0]) > step:
            return [], []
        packs = packs[:per_step]
        if not tight_behind:
            packs = [kept for pack in packs if (kept := [load for load in pack if when(load) <= step])]
        return list(chain.from_iterable(packs)), packs

    # --- sums and the layout ------------------------------------------------------------------------------------------

    def _enter(self, loads: Sequence[Load], due: int, use: int) -> None:
        positions = list(map(POSITION, loads))
        self._rows.update(zip(positions, loads, strict=True))
        self.due_of.update(zip(positions, repeat(due), strict=False))
        self.totals.count(loads, self.longest_short, 1, sum(map(COST, loads)), use)
        self._listed = None

    def _amounts(self, loads: Sequence[Load]) -> Iterable[int]:
        """What each row adds to the amount that the window holds."""
        amounts = map(USE, loads) if self.spec.num_packs is not None else repeat(1, len(loads))
        if self.held is None:
            return amounts
        return (0 if self.held(load) else amount for load, amount in zip(loads, amounts, strict=True))

    @property
    def _amount(self) -> int:
        """Rows that count (rows a step given), or their uses (packs a step given)."""
        if self.held is not None:
            return sum(self._amounts(self.loads))
        return self.totals.use if self.spec.num_packs is not None else self.totals.num_rows

    def _enough(self, amount: int) -> bool:
        """Whether this is all that the window shall hold."""
        if self.spec.num_packs is None:
            return amount >= self._target
        return (self._target - amount) & self.caps.guards != self.caps.guards

    @property
    def _places(self) -> int:
        """Places of the layout: those of rows that are not heavy, and one for each that is."""
        return len(self._laid().starts) + len(self.heavy)

    def _laid(self) -> Layout:
        """The layout of the window's rows without the heavy ones, in position order, which is that of due."""
        if self._layout is None:
            self._layout = Layout(self.caps, self.spec.num_packs)
            self._layout.lay(_without(self.loads, self.heavy))
        return self._layout

    def _lay(self, loads: Sequence[Load], heavy: Set[int]) -> int:
        """These rows into the layout, as many as its places allow, which is returned; the last may open one."""
        more = self._most_places - self._places
        layout, ordinary = self._laid(), _without(loads, heavy)
        before, first = len(layout.starts), layout.num_rows
        layout.lay(ordinary)
        opened = [ordinary[start - first].position for start in layout.starts[before:]]
        if len(ordinary) < len(loads):
            opened = sorted([*opened, *(load.position for load in loads if load.position in heavy)])
        if len(opened) < more:
            return len(loads)
        self._layout = None
        return bisect_right(loads, opened[more - 1], key=POSITION)

    def _packs(self, when: Callable[[Load], int]) -> Sequence[Sequence[Load]]:
        """The packs of the layout, also of heavy rows, in the order in which their first rows are due."""
        ordinary = _without(self.loads, self.heavy)
        starts = self._laid().starts
        packs = [ordinary[start:end] for start, end in pairwise([*starts, len(ordinary)])]
        if self.heavy:
            packs += [[self._rows[position]] for position in self.heavy]
            packs.sort(key=lambda pack: (when(pack[0]), pack[0].position))
        return packs


def _without(loads: Sequence[Load], heavy: Set[int]) -> Sequence[Load]:
    return [load for load in loads if load.position not in heavy] if heavy else loads
