"""Rows in, steps out (pure, contract C10).

    add(row) ─▶ incoming ─▶ Window ──Policy──▶ packs ─▶ Step
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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowtrain.packing.cost import CostModel
from flowtrain.packing.load import Caps, Load
from flowtrain.packing.policies import POLICIES, Draw, Due, Slots
from flowtrain.packing.spec import GRACE_STEPS, CompositionSpec
from flowtrain.packing.units import build_packs
from flowtrain.packing.window import DUE, HEAVY, POSITION, Window
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
        self._load_of = self._caps.loader(cost)
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
        self._carried: deque[tuple[int, int, bool]] = deque()
        """Position, due and heavy of rows that come again."""
        self._incoming: deque[SampleMeta | SkippedRow] = deque()
        self._ended = False
        self._heavy_above = heavy_tokens(spec, cost)

    @property
    def cost(self) -> CostModel:
        return self._cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        if cost != self._cost:
            self._cost, self._load_of = cost, self._caps.loader(cost)
            self._window.recost(cost)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready. `cursor`: positions below were read into the window; `carried`: those of them not yet trained;
        `due` and `heavy`: what was promised to each."""
        self._fill()
        return self._state()

    def _state(self) -> dict[str, Any]:
        # Rows enter in position order, those that come again first.
        loads, again = self._window.loads, self._carried
        return {
            "step": self.step,
            "cursor": self._cursor,
            "carried": [*map(POSITION, loads), *(position for position, _, _ in again)],
            "due": [*map(DUE, loads), *(due for _, due, _ in again)],
            "heavy": [*map(POSITION, filter(HEAVY, loads)), *(place for place, _, heavy in again if heavy)],
            "heavy_above": self._heavy_above,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the rows of `state["carried"]` are added first, ascending, then those from the cursor."""
        assert not self._window.loads, "a state is loaded before rows are added"
        assert not self._incoming, "a state is loaded before rows are added"
        self.step, self._cursor, self._next_position = state["step"], state["cursor"], state["cursor"]
        self._heavy_above = state["heavy_above"]
        heavy = set(state["heavy"])
        pairs = zip(state["carried"], state["due"], strict=True)
        self._carried = deque((position, due, position in heavy) for position, due in pairs)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def too_big(self, sample: SampleMeta) -> tuple[str, str] | None:
        """Reason and detail when a row can be in no pack."""
        spec = self.spec
        size, most = spec.vision_bytes(sample), spec.max_pack_vision_bytes
        if size > most:
            detail = f"its images take {size} bytes of the pool and a pack may take {most}: raise pool.bytes"
            return "too-many-image-bytes", detail
        if sample.tokens > spec.max_tokens and not spec.own_pack:
            detail = f"it has {sample.tokens} tokens and a pack may have {spec.max_tokens}: raise packing.max_tokens"
            return "too-long", detail
        for reason, key, number, limit in (
            ("too-many-patches", "max_patches", sample.patches, spec.max_patches),
            ("too-many-images", "max_images", len(sample.images), spec.max_images),
        ):
            if limit is not None and number > limit:
                what = key.removeprefix("max_")
                return reason, f"it has {number} {what} and a pack may have {limit}: raise packing.{key}"
        return None

    def add(self, row: SampleMeta | SkippedRow) -> None:
        """The next row: carried ones first, ascending, then every position from the cursor on."""
        expected = self._carried[0][0] if self._carried else self._next_position
        assert row.position == expected, f"row of position {row.position} came where {expected} was due"
        assert not self._ended, f"row of position {row.position} came after the end"
        if self._carried:
            _, due, heavy = self._carried.popleft()
            if isinstance(row, SampleMeta):
                self._window.add(self._fitting(self._load_of(row, due, heavy)))
            return
        self._next_position += 1
        self._incoming.append(row)

    def end(self) -> None:
        """No more rows come."""
        self._ended = True

    def wants(self) -> int:
        """Rows still to be added before the next step can be composed; a lower bound, positive while any is needed."""
        if self._over:
            return 0
        if self._carried:
            return len(self._carried)
        self._fill()
        if self._window.full:
            return 0
        missing = self._window.missing
        return missing if self.spec.step_samples is not None else -(-missing // self.spec.max_tokens)

    # --- steps --------------------------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """The next step, or None while rows are missing, and after the last."""
        if self._carried:
            return None
        self._fill()
        if not (self._window.full or self._over):
            return None
        loads = self._window.loads
        if not loads:
            return None
        self.step += 1
        due, early = Due(), Due()
        if self._policy.bounded:
            early = Due(*self._window.due(self.step, GRACE_STEPS))
            # What is due later cannot be due now.
            due = Due(*self._window.due(self.step)) if early.loads else early
        last = self._over and not self._incoming and not self._window.full
        slots = self._policy.compose(
            Draw(loads, self.spec, self.cost, self._caps, due, early, self._window.totals, last)
        )
        taken = [load for slot in slots for pack in slot for load in pack.loads]
        assert taken, "a step took no row"
        assert set(map(POSITION, due.loads)) <= set(map(POSITION, taken)), "a row that is due was left out"
        self._window.take(taken)
        state = self._state()
        return _step(Phase.TRAIN, self.step, slots, self.spec, self.cost, state)

    @property
    def _over(self) -> bool:
        """Whether all rows that will ever come are here."""
        horizon = self.spec.horizon
        return self._ended or (horizon is not None and self._next_position >= horizon and not self._carried)

    def _fill(self) -> None:
        """Rows into the window until it is full, and none beyond, so that arrival times change nothing."""
        if not self._incoming or self._carried:
            return
        make, heavy_above, spec, step = self._load_of, self._heavy_above, self.spec, self.step + 1
        due, heavy_due = step + spec.longest_wait(False), step + spec.longest_wait(True)

        def load_of(sample: SampleMeta) -> Load:
            heavy = sample.text_tokens + sample.vision_tokens > heavy_above
            return make(sample, heavy_due if heavy else due, heavy)

        num_before = len(self._window.loads)
        self._cursor = self._window.fill(self._incoming, load_of, self._cursor)
        room, guards = self._caps.room, self._caps.guards
        for load in self._window.loads[num_before:]:
            if (room - load.use) & guards != guards or load.heavy:
                self._fitting(load)

    def _fitting(self, load: Load) -> Load:
        assert self._caps.may_hold(load), self.too_big(load.sample)
        assert self.spec.own_pack or load.tokens == load.sample.tokens, self.too_big(load.sample)
        return load


def heavy_tokens(spec: CompositionSpec, cost: CostModel) -> int:
    """Tokens above which a row alone costs more than a full pack of short ones."""
    short = max(1, spec.max_tokens // SHORT_SHARE)
    full = cost.length_cost(short) * spec.max_tokens // short
    return bisect_right(range(spec.max_tokens + 1), full, key=cost.length_cost) - 1


def compose_eval(spec: CompositionSpec, cost: CostModel, samples: Sequence[SampleMeta], index: int) -> Step:
    """An evaluation pass over all samples after update `index`, in as few slots as the packs of the policy need."""
    if not samples:
        return _step(Phase.EVAL, index, [], spec, cost, {"cursor": 0})
    whole = replace(spec, step_samples=len(samples), step_packs=None, lookahead=1)
    caps = Caps.of(whole)
    load_of = caps.loader(cost)
    loads = sorted((load_of(sample, 0, False) for sample in samples), key=POSITION)
    slots = POLICIES[spec.policy].compose(Draw(loads, whole, cost, caps, last=True))
    return _step(Phase.EVAL, index, slots, spec, cost, {"cursor": 0})


def _step(
    phase: Phase, index: int, slots: Slots, spec: CompositionSpec, cost: CostModel, state: Mapping[str, Any]
) -> Step:
    packs = build_packs(phase, index, slots, spec, cost)
    positions = [load.position for slot in slots for pack in slot for load in pack.loads]
    return Step(phase, index, packs, len(positions), max(positions, default=0) // spec.num_rows, state)
