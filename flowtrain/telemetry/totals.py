"""What the whole run did, added up step by step, for summary.json (contract C11).

    StepMetrics, SkippedRow ──▶ Totals ──summary──▶ {exit, steps, rows, tokens, packs, run, wall_s, final}
                                  │ ▲
                              state │ from_state     (kept in every checkpoint, so that a resumed run counts on)

Invariant: rows read = rows trained + rows skipped, whatever the reason.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from typing import Any

from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.registry import Reduce, Tally
from flowtrain.telemetry.step_metrics import StepMetrics
from flowtrain.types import SkippedRow

MAX_IDS = 20
"""Ids named for each reason; the count goes on."""

NOT_FINAL = frozenset({m.STEP, m.ROWS, m.ROWS_SKIPPED, m.ROWS_SKIPPED_OF})


@dataclass(slots=True)
class SkippedRows:
    """Rows of one reason. `ids` holds the first `MAX_IDS`."""

    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, row_id: str) -> None:
        self.count += 1
        if len(self.ids) < MAX_IDS:
            self.ids.append(row_id)


@dataclass(slots=True)
class Totals:
    """Sums over the steps of a run and of those it was resumed from."""

    steps: int = 0
    rows_trained: int = 0
    text_tokens: int = 0
    vision_tokens: int = 0
    trained_tokens: int = 0
    num_packs: int = 0
    capacity_tokens: int = 0
    wall_seconds: float = 0.0
    skipped: dict[str, SkippedRows] = field(default_factory=dict)
    own_packs: SkippedRows = field(default_factory=SkippedRows)
    tallies: dict[str, Tally] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    def step(self, metrics: StepMetrics) -> dict[str, Any]:
        """Add one finished step; its record, which is returned, becomes the last known values."""
        assert metrics.step > self.steps, f"step {metrics.step} comes after step {self.steps}"
        self.steps = metrics.step
        self.rows_trained += metrics.rows
        self.text_tokens += metrics.text_tokens
        self.vision_tokens += metrics.vision_tokens
        self.trained_tokens += metrics.trained_tokens
        self.num_packs += metrics.num_packs
        self.capacity_tokens += metrics.capacity_tokens
        record = metrics.to_record()
        for name, value in record.items():
            how = _over_steps(name)
            if how is not None and value is not None and math.isfinite(value):
                weight = metrics.seconds if how is Reduce.TIME_MEAN else 1
                self.tallies.setdefault(name, Tally()).add(value, weight)
        last_eval = self.final.get(m.EVAL_LOSS.name)
        self.final = {name: value for name, value in record.items() if m.METRICS.find(name)[0] not in NOT_FINAL}
        if last_eval is not None:
            self.final.setdefault(m.EVAL_LOSS.name, last_eval)
        return record

    def skip(self, row: SkippedRow) -> None:
        """Count a row that was read and not trained."""
        self.skipped.setdefault(row.reason, SkippedRows()).add(row.id)

    def own_pack(self, row_id: str) -> None:
        """Count a row that was longer than a pack and trained in one of its own."""
        self.own_packs.add(row_id)

    def evaluated(self, loss: float) -> None:
        """The evaluation loss after the last step."""
        self.final[m.EVAL_LOSS.name] = loss

    @property
    def rows_skipped(self) -> int:
        return sum(rows.count for rows in self.skipped.values())

    @property
    def rows_read(self) -> int:
        return self.rows_trained + self.rows_skipped

    def summary(self, exit_code: int) -> dict[str, Any]:
        """The content of summary.json."""
        used = self.text_tokens + self.vision_tokens
        return {
            "exit": exit_code,
            "steps": self.steps,
            "rows": {
                "read": self.rows_read,
                "trained": self.rows_trained,
                "skipped": {reason: _skipped_dict(rows) for reason, rows in sorted(self.skipped.items())},
            },
            "tokens": {"text": self.text_tokens, "vision": self.vision_tokens, "trained": self.trained_tokens},
            "packs": {
                "count": self.num_packs,
                "fill": used / self.capacity_tokens if self.capacity_tokens else None,
                "rows": self.rows_trained / self.num_packs if self.num_packs else None,
                "own": _skipped_dict(self.own_packs),
            },
            "run": {name: tally.value(how) for name, tally in self.tallies.items() if (how := _over_steps(name))},
            "wall_s": self.wall_seconds,
            "final": dict(self.final),
        }

    def state(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "steps": self.steps,
            "rows_trained": self.rows_trained,
            "text_tokens": self.text_tokens,
            "vision_tokens": self.vision_tokens,
            "trained_tokens": self.trained_tokens,
            "num_packs": self.num_packs,
            "capacity_tokens": self.capacity_tokens,
            "wall_seconds": self.wall_seconds,
            "skipped": {reason: _skipped_dict(rows) for reason, rows in self.skipped.items()},
            "own_packs": _skipped_dict(self.own_packs),
            "tallies": {name: astuple(tally) for name, tally in self.tallies.items()},
            "final": dict(self.final),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Totals:
        """The totals that `state` was taken from."""
        skipped = {reason: _skipped_rows(rows) for reason, rows in state["skipped"].items()}
        own = _skipped_rows(state["own_packs"])
        tallies = {name: Tally(*parts) for name, parts in state["tallies"].items()}
        return cls(**{**state, "skipped": skipped, "own_packs": own, "tallies": tallies, "final": dict(state["final"])})


def _skipped_rows(state: dict[str, Any]) -> SkippedRows:
    return SkippedRows(state["count"], list(state["ids"]))


def _skipped_dict(rows: SkippedRows) -> dict[str, Any]:
    return {"count": rows.count, "ids": list(rows.ids)}


def _over_steps(name: str) -> Reduce | None:
    return m.METRICS.find(name)[0].steps
