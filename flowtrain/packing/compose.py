"""Rows in, steps out (pure, contract C10).

    add(rows) ─▶ incoming ─▶ Window ──Policy──▶ packs ─▶ Step
                   any        a fixed number of rows, however many have arrived
                                 └──── rows left out are carried to the next step

Invariants (`assert_invariants` of the tests):
1. Every row below the horizon is in one step, once, or was skipped; the caps of a pack are kept.
2. Every slot has one pack for each rank.
3. Steps depend on the rows and the spec: not on when rows arrived, nor on rows behind the window; `num_producers` sets
   only `EncodeUnit.producer`.
4. `state_dict()`, also found in every step, is the whole state: a composer that loads it makes the steps that would
   have followed.
5. A bounded policy trains every row by the step in which it is due (`flowtrain.packing.window`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import Caps
from flowtrain.packing.policies import POLICIES, Draw, Due, Slots
from flowtrain.packing.spec import GRACE_STEPS, CompositionSpec
from flowtrain.packing.table import Loader, LoadTable, joined
from flowtrain.packing.units import build_packs
from flowtrain.packing.window import Window
from flowtrain.types import Phase, SampleMeta, SkippedRow, Step

SHORT_SHARE = 8
"""A row is heavy when it costs more than a full pack of rows of which so many fit."""


class Composer:
    """See the module's page. `cost` may be set between steps: it holds from the next step on.

    Which rows are heavy is fixed by the cost with which the first composer of a run began, in tokens: rows enter when
    they arrive, which may be before or after a new cost, and must not be told apart by that.
    """

    def __init__(self, spec: CompositionSpec, cost: CostModel) -> None:
        self.spec = spec
        self.step = 0
        self._cost = cost
        self._caps = Caps.of(spec)
        self._loader = Loader(spec, cost)
        self._policy = POLICIES[spec.policy]
        self._window = Window(
            spec,
            self._caps,
            self._policy.steps_ahead(spec),
            self._policy.bounded,
            self._policy.held(spec),
        )
        self._cursor = 0
        self._next_position = 0
        self._carried: dict[int, tuple[int, bool]] = {}
        """Due and heavy of rows that come again, by position, ascending."""
        self._arrived: list[SampleMeta] = []
        self._arrived_sizes: list[list[int]] = [[] for _ in self._caps.limits]
        self._incoming = LoadTable.empty(self._caps)
        self._ended = False
        self._heavy_above = heavy_tokens(spec, cost)

    @property
    def cost(self) -> CostModel:
        return self._cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        if cost != self._cost:
            self._cost, self._loader = cost, Loader(self.spec, cost)
            self._window.recost(self._loader)
            self._incoming = self._loader(self._incoming.samples, self._incoming.sizes)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready. `cursor`: positions below were read into the window; `carried`: those of them not yet trained;
        `due` and `heavy`: what was promised to each."""
        self._fill()
        return self._state()

    def _state(self) -> dict[str, Any]:
        # Rows enter in position order, those that come again first.
        rows, again = self._window.table, self._carried
        return {
            "step": self.step,
            "cursor": self._cursor,
            "carried": [*rows.positions.tolist(), *again],
            "due": [*rows.dues.tolist(), *(due for due, _ in again.values())],
            "heavy": [
                *rows.positions[rows.heavy].tolist(),
                *(position for position, (_, heavy) in again.items() if heavy),
            ],
            "heavy_above": self._heavy_above,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the rows of `state["carried"]` are added first, ascending, then those from the cursor."""
        assert not self._window.table.num_rows, "a state is loaded before rows are added"
        assert self._next_position == 0, "a state is loaded before rows are added"
        self.step, self._cursor, self._next_position = state["step"], state["cursor"], state["cursor"]
        self._heavy_above = state["heavy_above"]
        heavy = set(state["heavy"])
        pairs = zip(state["carried"], state["due"], strict=True)
        self._carried = {position: (due, position in heavy) for position, due in pairs}

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[SampleMeta | SkippedRow]) -> list[SkippedRow]:
        """The next rows: carried ones first, ascending, then every position from the cursor on.

        Returns those of them that can be in no pack; they are left out like rows that were skipped before.
        """
        assert not (rows and self._ended), f"row of position {rows[0].position} came after the end"
        num_again = min(len(rows), len(self._carried))
        num_new = len(rows) - num_again
        found = [row.position for row in rows]
        expected = [*islice(self._carried, num_again), *range(self._next_position, self._next_position + num_new)]
        assert found == expected, next(
            f"row of position {came} came where {due} was due"
            for came, due in zip(found, expected, strict=True)
            if came != due
        )
        self._next_position += num_new
        samples = [row for row in rows if isinstance(row, SampleMeta)]
        sizes = self._loader.sizes(samples)
        over = self._caps.over(sizes)
        too_big = [samples[number] for number in sorted(over)]
        if over:
            samples = [sample for number, sample in enumerate(samples) if number not in over]
            sizes = self._loader.sizes(samples)
        if num_again:
            again = {position: self._carried.pop(position) for position in found[:num_again]}
            table = self._loader(samples, sizes)
            num_kept = bisect_right(table.positions, found[num_again - 1])
            kept = table.part(0, num_kept)
            promises = [again[position] for position in kept.positions.tolist()]
            dues, heavy = np.array([due for due, _ in promises], np.int64), np.array([h for _, h in promises], np.bool_)
            self._window.add(kept.promised(dues, heavy))
            samples, sizes = samples[num_kept:], [of_cap[num_kept:] for of_cap in sizes]
        self._arrived += samples
        for of_cap, more in zip(self._arrived_sizes, sizes, strict=True):
            of_cap += more
        return [self._skipped(sample) for sample in too_big]

    def too_big(self, samples: Sequence[SampleMeta]) -> list[SkippedRow]:
        """Those of these rows, such as held-out ones, that no pack can hold, with the reason."""
        return [self._skipped(samples[number]) for number in sorted(self._caps.over(self._loader.sizes(samples)))]

    def end(self) -> None:
        """No more rows come."""
        self._ended = True

    def wants(self) -> int:
        """About how many rows are still to be added before the next step can be composed; positive while any is."""
        if self._over:
            return 0
        if self._carried:
            return len(self._carried)
        self._fill()
        if self._window.full:
            return 0
        missing = self._window.missing
        return missing if self.spec.step_samples is not None else max(1, missing // self._window.mean_tokens)

    # --- steps --------------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """The next step, or None while rows are missing, and after the last."""
        if self._carried:
            return None
        self._fill()
        window = self._window
        if not (window.full or self._over) or not window.table.num_rows:
            return None
        self.step += 1
        due, early = Due(), Due()
        if self._policy.bounded:
            early = Due(window.due(self.step, GRACE_STEPS))
            # What is due later cannot be due now.
            due = Due(window.due(self.step)) if early.packs else early
        last = self._over and not self._incoming.num_rows and not window.full
        rows = window.table
        slots = self._policy.compose(Draw(rows, self.spec, self.cost, self._caps, due, early, last))
        taken = [load.place for slot in slots for pack in slot for load in pack.loads]
        assert {load.place for load in due.loads}.issubset(taken), "a row that is due was left out"
        window.take(np.array(taken, np.int64))
        step = _step(Phase.TRAIN, self.step, rows, slots, self.spec, self.cost, self._state())
        assert step.rows, "a step took no row"
        return step

    @property
    def _over(self) -> bool:
        """Whether all rows that will ever come are here."""
        horizon = self.spec.horizon
        return self._ended or (horizon is not None and self._next_position >= horizon and not self._carried)

    def _fill(self) -> None:
        """Rows into the window until it is full, and none beyond, so that arrival times change nothing."""
        window, above = self._window, self._heavy_above
        if self._carried or window.full:
            return
        step = self.step + 1
        due, heavy_due = step + self.spec.longest_wait(False), step + self.spec.longest_wait(True)
        waiting = self._incoming
        if self._arrived:
            waiting = joined([waiting, self._loader(self._arrived, self._arrived_sizes)])
            self._arrived, self._arrived_sizes = [], [[] for _ in self._caps.limits]
        if waiting.num_rows:
            num = window.fill(waiting, due, waiting.lengths > above, heavy_due)
            self._cursor = int(waiting.positions[num - 1]) + 1
            waiting = waiting.part(num)
        self._incoming = waiting
        if not window.full:
            self._cursor = self._next_position

    def _skipped(self, sample: SampleMeta) -> SkippedRow:
        """A row that can be in no pack, with the reason."""
        spec = self.spec
        size, most = spec.vision_bytes(sample), spec.max_pack_vision_bytes
        if size > most:
            reason = "too-many-image-bytes"
            change = "raise packing.max_tokens, or packing.max_patches where it is set"
            detail = f"its images take {size} bytes of the pool and a pack may take {most}: {change}"
        else:
            counts = (
                ("too-long", "tokens", sample.tokens, None if spec.own_pack else spec.max_tokens),
                ("too-many-patches", "patches", sample.patches, spec.max_patches),
                ("too-many-images", "images", len(sample.images), spec.max_images),
                ("too-many-trained", "trained_tokens", sample.trained_tokens, spec.max_trained_tokens),
            )
            reason, what, number, limit = next(
                count for count in counts if count[3] is not None and count[2] > count[3]
            )
            detail = f"it has {number} {what.replace('_', ' ')} and a pack may have {limit}: raise packing.max_{what}"
        return SkippedRow(sample.position, sample.row, sample.id, reason, detail)


def heavy_tokens(spec: CompositionSpec, cost: CostModel) -> int:
    """Tokens above which a row alone costs more than a full pack of short ones."""
    short = max(1, spec.max_tokens // SHORT_SHARE)
    full = cost.length_cost(short) * spec.max_tokens // short
    return bisect_right(range(spec.max_tokens + 1), full, key=cost.length_cost) - 1


def compose_eval(spec: CompositionSpec, cost: CostModel, samples: Sequence[SampleMeta], index: int) -> Step:
    """An evaluation pass over all samples after update `index`, in as few slots as the packs of the policy need.

    A pack must hold each of them (`Composer.too_big`).
    """
    rows = Loader(spec, cost)(sorted(samples, key=attrgetter("position")))
    slots: Slots = []
    if samples:
        whole = replace(spec, step_samples=len(samples), step_packs=None, lookahead=1)
        slots = POLICIES[spec.policy].compose(Draw(rows, whole, cost, Caps.of(whole), last=True))
    return _step(Phase.EVAL, index, rows, slots, spec, cost, {"cursor": 0})


def _step(
    phase: Phase,
    index: int,
    rows: LoadTable,
    slots: Slots,
    spec: CompositionSpec,
    cost: CostModel,
    state: Mapping[str, Any],
) -> Step:
    packs = build_packs(phase, index, rows, slots, spec, cost)
    positions = [pack.samples[-1].position for slot in packs for pack in slot if pack.samples]
    num_rows = sum(len(pack.samples) for slot in packs for pack in slot)
    return Step(phase, index, packs, num_rows, max(positions, default=0) // spec.num_rows, state)
