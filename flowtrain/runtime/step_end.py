"""The end of a step: one loss, one gradient norm over both sides, one factor (pure, contracts C2, C3 and C7).

    PackTrained × packs ─┐
    ReduceReport × ranks ┴─▶ StepEnd.order() ─▶ UpdateOrder for every rank ─▶ UpdateReport × ranks ─▶ done

Losses are summed in the fixed order slot, rank; square sums of the two sides are added encoder, projector, backbone.
Every rank of a side reports the same numbers (they were summed over its ranks); they are checked against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flowtrain.messages import PackTrained, ReduceReport, UpdateOrder, UpdateReport
from flowtrain.types import Module, Role, Step
from flowtrain.update.clip import clip_factor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Norms are those of the mean loss, before clipping; NaN-free unless `finite` is False."""

    loss: float
    trained_tokens: int
    square_sums: dict[Module, float]
    clip: float
    applied: bool
    finite: bool

    @property
    def grad_norm(self) -> float:
        return math.sqrt(math.fsum(self.square_sums.values()))

    def module_norm(self, module: Module) -> float:
        return math.sqrt(self.square_sums.get(module, 0.0))


@dataclass(slots=True)
class StepEnd:
    """Collects the answers of one step; `ranks` are those of the sides that train."""

    step: Step
    ranks: frozenset[tuple[Role, int]]
    clip_norm: float | None
    denominator_offset: int = 0
    packs: dict[tuple[int, int], PackTrained] = field(default_factory=dict)
    reports: dict[tuple[Role, int], ReduceReport] = field(default_factory=dict)
    updates: dict[tuple[Role, int], UpdateReport] = field(default_factory=dict)

    def trained(self, answer: PackTrained) -> None:
        self.packs[answer.slot, answer.rank] = answer

    def reduced(self, role: Role, rank: int, report: ReduceReport) -> None:
        self.reports[role, rank] = report

    def updated(self, role: Role, rank: int, report: UpdateReport) -> None:
        self.updates[role, rank] = report

    @property
    def ready(self) -> bool:
        """Whether every pack and every report of a side that trains is in."""
        return len(self.packs) == len(self.step.packs) and self.reports.keys() == self.ranks

    @property
    def done(self) -> bool:
        return self.updates.keys() == self.ranks

    @property
    def trained_tokens(self) -> int:
        return sum(answer.trained_tokens for answer in self.packs.values())

    def loss(self) -> float:
        """Mean loss over the trained tokens, summed slot by slot, rank by rank; call once all packs are in."""
        ordered = [self.packs[pack.slot, pack.rank] for pack in self.step.packs]
        return sum(answer.loss_sum for answer in ordered) / self._denominator

    @property
    def _denominator(self) -> int:
        return max(self.trained_tokens + self.denominator_offset, 1)

    def result(self) -> StepResult:
        """Loss and norms of the step; call once `ready`."""
        loss, trained_tokens, denominator = self.loss(), self.trained_tokens, self._denominator
        square_sums: dict[Module, float] = {}
        for role in (Role.PRODUCER, Role.CONSUMER):
            reports = [report for (side, _), report in sorted(self.reports.items()) if side is role]
            for report in reports[:1]:
                for module, value in report.square_sums.items():
                    assert module not in square_sums, f"{module} trains on both sides"
                    square_sums[module] = value / denominator**2
            assert all(repr(r.square_sums) == repr(reports[0].square_sums) for r in reports), (
                f"ranks of the {role} side disagree on their gradients: {[r.square_sums for r in reports]}"
            )
        norm = math.sqrt(sum(square_sums.values()))
        finite = math.isfinite(loss) and math.isfinite(norm)
        applied = finite and trained_tokens > 0
        clip = clip_factor(norm, self.clip_norm) if applied else 0.0
        return StepResult(loss, trained_tokens, square_sums, clip, applied, finite)

    def order(self, result: StepResult, lr: dict[Module, float], gradients_to: str | None) -> UpdateOrder:
        return UpdateOrder(self.step.index, 1.0 / self._denominator, result.clip, lr, result.applied, gradients_to)
