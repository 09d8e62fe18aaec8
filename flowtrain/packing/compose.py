"""Rows in, steps out (pure, contract C10).

    add(row) ─▶ incoming ─▶ window ──policy──▶ Step
                  any        a fixed number of rows, however many have arrived
                                └──── rows left out are carried to the next step

Invariants (`assert_invariants` of the tests):
1. Every row below the horizon is in one step, once, or was skipped; the bounds of a pack are kept.
2. Every slot has one pack for each rank.
3. Steps depend on the rows and the spec: not on when rows arrived; `num_producers` sets only `EncodeUnit.producer`.
4. `(cursor, carried)` of a step is the whole state: a composer begun from it makes the steps that would have followed.
5. No row is carried past the `lookahead`-th step after the one in which it would have been in order of arrival
   (skipped rows aside).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from flowtrain.packing.cost import CostModel
from flowtrain.packing.policies import POLICIES, Slots
from flowtrain.packing.spec import CompositionSpec
from flowtrain.packing.units import build_packs
from flowtrain.types import Phase, SampleMeta, SkippedRow, Step


class Composer:
    """See the module's page. Goes on from `cursor`, `carried` and `step` of an earlier one's last step."""

    def __init__(
        self, spec: CompositionSpec, cost: CostModel, cursor: int = 0, carried: Sequence[int] = (), step: int = 0
    ) -> None:
        self.spec = spec
        self.cost = cost
        self.step = step
        self._cursor = cursor
        self._expected = deque(sorted(carried))
        self._next_position = cursor
        self._incoming: deque[SampleMeta | SkippedRow] = deque()
        self._window: list[SampleMeta] = []
        self._ended = False
        # Arrival takes rows as they come: a longer window would change nothing and read further ahead.
        self._window_steps = 1 if spec.policy == "arrival" else spec.lookahead

    def too_big(self, sample: SampleMeta) -> str:
        """Why a row can be in no pack, empty when it can."""
        size, most = self.spec.vision_bytes(sample), self.spec.max_pack_vision_bytes
        if size > most:
            return f"its images take {size} bytes of the pool and a pack may take {most}: raise pool.bytes"
        if sample.tokens > self.spec.max_tokens:
            return f"it has {sample.tokens} tokens and a pack may have {self.spec.max_tokens}: raise packing.max_tokens"
        return ""

    def add(self, row: SampleMeta | SkippedRow) -> None:
        """The next row: carried ones first, ascending, then every position from the cursor on."""
        expected = self._expected.popleft() if self._expected else self._next_position
        assert row.position == expected, f"row of position {row.position} came where {expected} was due"
        assert not self._ended, f"row of position {row.position} came after the end"
        self._next_position = max(self._next_position, row.position + 1)
        self._incoming.append(row)

    def end(self) -> None:
        """No more rows come."""
        self._ended = True

    def wants(self) -> int:
        """Rows still to be added before the next step can be composed; a lower bound, positive while any is needed."""
        if self._over:
            return 0
        waiting = [*self._window, *(row for row in self._incoming if isinstance(row, SampleMeta))]
        missing = self._missing(waiting)
        return missing if self.spec.step_samples is not None else -(-missing // self.spec.max_tokens)

    def next(self) -> Step | None:
        """The next step, or None while rows are missing, and after the last."""
        self._fill()
        if not self._window or (self._missing(self._window) and not self._over):
            return None
        # After the last row turns go on: a row left over must not wait longer because none follow.
        lacking = self._missing(self._window) if self.spec.step_samples is not None else 0
        slots = POLICIES[self.spec.policy](self._window, self.spec, self.cost, self._cursor + lacking)
        taken = {sample.position for slot in slots for pack in slot for sample in pack}
        self._window = [sample for sample in self._window if sample.position not in taken]
        self.step += 1
        carried = tuple(sample.position for sample in self._window)
        return _step(Phase.TRAIN, self.step, slots, self.spec, self.cost, self._cursor, carried)

    @property
    def _over(self) -> bool:
        """Whether all rows that will ever come are here."""
        horizon = self.spec.horizon
        return self._ended or (horizon is not None and self._next_position >= horizon and not self._expected)

    def _missing(self, samples: Sequence[SampleMeta]) -> int:
        """Rows (or tokens, for a step of packs) that a window of these samples lacks."""
        if self.spec.step_samples is not None:
            return max(0, self._window_steps * self.spec.step_samples - len(samples))
        assert self.spec.step_packs is not None
        wanted = self._window_steps * self.spec.step_packs * self.spec.num_consumers * self.spec.max_tokens
        return max(0, wanted - sum(sample.tokens for sample in samples))

    def _fill(self) -> None:
        """Move rows into the window until it is full, and none beyond, so that arrival times change nothing."""
        while self._incoming and self._missing(self._window):
            row = self._incoming.popleft()
            self._cursor = max(self._cursor, row.position + 1)
            if isinstance(row, SampleMeta):
                assert not self.too_big(row), f"row {row.id}: {self.too_big(row)}"
                self._window.append(row)


def compose_eval(spec: CompositionSpec, cost: CostModel, samples: Sequence[SampleMeta], index: int) -> Step:
    """An evaluation pass over all samples after update `index`, in as few slots as the packs of the policy need."""
    if not samples:
        return _step(Phase.EVAL, index, [], spec, cost, 0, ())
    whole = replace(spec, step_samples=len(samples), step_packs=None, lookahead=1)
    ordered = sorted(samples, key=lambda sample: sample.position)
    slots = POLICIES[spec.policy](ordered, whole, cost, ordered[-1].position + 1)
    return _step(Phase.EVAL, index, slots, spec, cost, 0, ())


def _step(
    phase: Phase,
    index: int,
    slots: Slots,
    spec: CompositionSpec,
    cost: CostModel,
    cursor: int,
    carried: tuple[int, ...],
) -> Step:
    packs = build_packs(phase, index, slots, spec, cost)
    positions = [sample.position for slot in slots for pack in slot for sample in pack]
    last = max(positions, default=0)
    return Step(phase, index, packs, len(positions), last // spec.num_rows, cursor, carried)
