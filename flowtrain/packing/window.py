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

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from flowtrain.packing.load import MOST, Bools, Caps, Ints, Load
from flowtrain.packing.spec import CompositionSpec
from flowtrain.packing.table import Loader, LoadTable, joined


@dataclass(slots=True)
class Layout:
    """Next-fit of rows in order, none of them heavy, as long as rows only come.

    `starts`: number of the row with which each pack begins (packs a step given), or all numbers (rows a step given).
    """

    caps: Caps
    num_packs: int | None
    starts: list[int] = field(default_factory=list)
    num_rows: int = 0
    used: Ints = field(init=False)
    """Of the last pack, by cap; of one that is full while no pack is open, since every row has a token."""

    def __post_init__(self) -> None:
        self.used = np.array(self.caps.limits, np.int64)

    def lay(self, sizes: Ints) -> None:
        """The next rows; `sizes` by cap and row."""
        first, num = self.num_rows, sizes.shape[1]
        self.num_rows += num
        if self.num_packs is None:
            self.starts.extend(range(first, self.num_rows))
            return
        # What the open pack has stands before the first row; `ends`: where a pack ends that begins with each row.
        sums = np.zeros((len(sizes), num + 2), np.int64)
        sums[:, 1] = self.used
        np.cumsum(sizes, axis=1, out=sums[:, 2:])
        sums[:, 2:] += sums[:, 1:2]
        limits = np.array(self.caps.limits, np.int64)
        ends = np.min(
            [np.searchsorted(of_cap, of_cap[:-1] + limit, "right") for of_cap, limit in zip(sums, limits, strict=True)],
            axis=0,
        ).tolist()
        begun, end = 0, ends[0] - 1
        while end <= num:
            self.starts.append(first + end - 1)
            begun, end = end, ends[end] - 1
        self.used = sums[:, -1] - sums[:, begun]


class Window:
    """Rows in position order.

    Args:
        steps: how many steps of rows the window shall hold.
        bounded: whether the promise is kept; otherwise rows are let in by number alone.
        held: tells of rows, by their tokens, which ones the policy keeps back, so that they do not count; None when it
            keeps none.
    """

    def __init__(
        self,
        spec: CompositionSpec,
        caps: Caps,
        steps: int,
        bounded: bool,
        held: Callable[[Ints], Bools] | None = None,
    ) -> None:
        self.spec, self.caps, self.bounded, self.held = spec, caps, bounded, held
        self._parts = [LoadTable.empty(caps)]
        self._num_heavy = 0
        self._layout: Layout | None = None
        self._most_places = (spec.wait_steps + 1) * self.places_per_step
        target = steps * self.places_per_step
        limits = (1,) if spec.num_packs is None else caps.limits
        self._target = np.array([min(max(target * limit, 1), MOST + 1) for limit in limits], np.int64)
        self._amount = np.zeros(len(limits), np.int64)
        """Rows that count (rows a step given), or what they take by each cap (packs a step given)."""

    @property
    def table(self) -> LoadTable:
        self._parts = [joined(self._parts)]
        return self._parts[0]

    @property
    def places_per_step(self) -> int:
        number = self.spec.num_packs if self.spec.num_packs is not None else self.spec.step_samples
        assert number is not None
        return number

    @property
    def full(self) -> bool:
        """Whether the next row has to wait outside."""
        # The next row opens one more place at most, and must be let in whatever it is.
        return bool((self._amount >= self._target).any()) or (self.bounded and self._places >= self._most_places)

    @property
    def missing(self) -> int:
        """Rows (or tokens, for a step of packs) that the window lacks while it is not full."""
        return int(self._target[0] - self._amount[0])

    @property
    def mean_tokens(self) -> int:
        """Of the rows of a window of packs; while there are none, those of a full pack."""
        num = sum(rows.num_rows for rows in self._parts)
        return max(1, int(self._amount[0]) // num) if num else self.spec.max_tokens

    def add(self, rows: LoadTable) -> None:
        """Rows of an earlier window with what was promised to them, whether this one is full or not."""
        self._enter(rows)
        self._layout = None

    def fill(self, waiting: LoadTable, due: int, heavy: Bools, heavy_due: int) -> int:
        """Rows in until the window is full or none waits; returns how many. Heavy ones are due at `heavy_due`."""
        sums = np.cumsum(self._amounts(waiting), axis=1)
        lacks = self._target - self._amount
        reached = min(int(np.searchsorted(of_cap, lack)) for of_cap, lack in zip(sums, lacks, strict=True))
        num = min(reached + 1, waiting.num_rows)
        if self.bounded:
            num = self._lay(waiting.sizes[:, :num], heavy[:num])
        entered, heavy = waiting.part(0, num), heavy[:num]
        self._enter(entered.promised(np.where(heavy, heavy_due, due), heavy))
        return num

    def take(self, places: Ints) -> None:
        """The rows at these places of `table` leave."""
        left = np.ones(self.table.num_rows, np.bool_)
        left[places] = False
        rows = self.table.at(np.flatnonzero(left))
        self._parts, self._layout = [rows], None
        self._num_heavy = int(np.count_nonzero(rows.heavy))
        self._amount = self._amounts(rows).sum(axis=1)

    def recost(self, loader: Loader) -> None:
        """Costs by another model; what was promised stays."""
        rows = self.table
        self._parts = [loader(rows.samples, rows.sizes).promised(rows.dues, rows.heavy)]

    def due(self, step: int, early: int = 0) -> list[list[Load]]:
        """Rows that step `step` must have, in packs of the layout's first step, which shows that they fit.

        `early`: rows that are not heavy count as due so many steps before they are.
        """
        table, per_step = self.table, self.places_per_step
        if not table.num_rows:
            return []
        heavy = table.heavy
        when = table.dues - np.where(heavy, 0, early)
        places, begins, nums = self._packs(heavy, when)
        # Of the rows of a pack, and of the packs of a step, the first is due first, so it alone is looked at.
        firsts = when[places[begins[::per_step]]] - step
        tight_behind = bool((firsts[1:] <= np.arange(1, len(firsts))).any())
        if not tight_behind and firsts[0] > 0:
            return []
        begins, nums = begins[:per_step], nums[:per_step]
        behind = np.cumsum(nums)
        places = places[np.arange(behind[-1]) + np.repeat(begins - (behind - nums), nums)]
        if not tight_behind:
            now = when[places] <= step
            nums = np.add.reduceat(now, behind - nums, dtype=np.int64)
            places = places[now]
        loads = iter(table.loads(places))
        return [list(islice(loads, num)) for num in nums.tolist() if num]

    # --- sums and the layout ------------------------------------------------------------------------------------------

    def _enter(self, rows: LoadTable) -> None:
        self._parts.append(rows)
        self._num_heavy += int(np.count_nonzero(rows.heavy))
        self._amount += self._amounts(rows).sum(axis=1)

    def _amounts(self, rows: LoadTable) -> Ints:
        """What each row adds to the amount that the window holds, by cap."""
        amounts = np.ones((1, rows.num_rows), np.int64) if self.spec.num_packs is None else rows.sizes
        return amounts if self.held is None else np.where(self.held(rows.tokens), 0, amounts)

    @property
    def _places(self) -> int:
        """Places of the layout: those of rows that are not heavy, and one for each that is."""
        return len(self._laid().starts) + self._num_heavy

    def _laid(self) -> Layout:
        """The layout of the window's rows without the heavy ones, in position order, which is that of due."""
        if self._layout is None:
            table = self.table
            self._layout = Layout(self.caps, self.spec.num_packs)
            self._layout.lay(table.sizes[:, ~table.heavy])
        return self._layout

    def _lay(self, sizes: Ints, heavy: Bools) -> int:
        """These rows into the layout, as many as its places allow, which is returned; the last may open one."""
        more = self._most_places - self._places
        layout = self._laid()
        before, first = len(layout.starts), layout.num_rows
        layout.lay(sizes[:, ~heavy])
        opens = heavy.copy()
        opens[np.flatnonzero(~heavy)[np.array(layout.starts[before:], np.int64) - first]] = True
        opened = np.flatnonzero(opens)
        if len(opened) < more:
            return len(heavy)
        self._layout = None
        return int(opened[more - 1]) + 1

    def _packs(self, heavy: Bools, when: Ints) -> tuple[Ints, Ints, Ints]:
        """Places of rows, and of each pack of the layout where it begins among them and how many rows it has, in the
        order in which packs are due; a heavy row is a pack."""
        ordinary, dear = np.flatnonzero(~heavy), np.flatnonzero(heavy)
        begins = np.array(self._laid().starts, np.int64)
        nums = np.diff(begins, append=len(ordinary))
        if not len(dear):
            return ordinary, begins, nums
        places = np.concatenate((ordinary, dear))
        begins = np.concatenate((begins, np.arange(len(ordinary), len(places))))
        nums = np.concatenate((nums, np.ones_like(dear)))
        order = np.lexsort((places[begins], when[places[begins]]))
        return places, begins[order], nums[order]
