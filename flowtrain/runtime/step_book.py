"""What is known of one step so far, from its composition to its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.flops import palm_flops, step_flops
from flowtrain.messages import PackTrained, PoolUse, UnitEncoded, UnitsReturned, UpdateReport
from flowtrain.plan import Plan
from flowtrain.runtime.decisions import Choice, unit_of
from flowtrain.runtime.pace import Pace
from flowtrain.runtime.step_end import StepResult
from flowtrain.shapes import ModelShape
from flowtrain.telemetry.step_metrics import StepMetrics
from flowtrain.types import Module, Role, SkippedRow, Step


@dataclass(slots=True)
class StepBook:
    """Mappings are by data-parallel rank, of which the first process speaks for all."""

    step: Step
    skipped: tuple[SkippedRow, ...]
    choice: Choice
    result: StepResult | None = None
    lr: Mapping[Module, float] = field(default_factory=dict)
    bad: Mapping[int, SkippedRow] = field(default_factory=dict)
    seconds: float = 0.0
    eval_loss: float | None = None
    stall: dict[int, float] = field(default_factory=dict)
    starvation: dict[int, float] = field(default_factory=dict)
    producer_seconds: dict[int, float] = field(default_factory=dict)
    consumer_seconds: dict[int, float] = field(default_factory=dict)
    encode_costs: dict[int, int] = field(default_factory=dict)
    pack_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    pool_written: Counter[str] = field(default_factory=Counter)
    pool_read: Counter[str] = field(default_factory=Counter)
    pool_seconds: dict[tuple[Role, int], float] = field(default_factory=dict)
    pool_pinned: dict[tuple[Role, int], int] = field(default_factory=dict)
    occupancy: float = 0.0

    def encoded(self, answer: UnitEncoded, occupancy: float) -> None:
        """`occupancy`: used share of the pool right now."""
        _add(self.stall, answer.producer, answer.waited)
        _add(self.producer_seconds, answer.producer, answer.seconds)
        unit = unit_of(self.step, answer.unit)
        _add(self.encode_costs, answer.producer, self.choice.cost.unit_cost(unit.samples))
        self.bytes_in += sum(ref.bytes for ref in answer.refs)
        self._used(Role.PRODUCER, answer.producer, answer.pool)
        self.occupancy = max(self.occupancy, occupancy)

    def trained(self, answer: PackTrained, num_bytes: int) -> None:
        """`num_bytes`: features that the pack got from the pool."""
        _add(self.starvation, answer.rank, answer.waited)
        _add(self.consumer_seconds, answer.rank, answer.seconds)
        self.pack_seconds[answer.slot, answer.rank] = answer.seconds
        self.bytes_out += num_bytes
        self._used(Role.CONSUMER, answer.rank, answer.pool)

    def returned(self, answer: UnitsReturned) -> None:
        _add(self.stall, answer.producer, answer.waited)
        _add(self.producer_seconds, answer.producer, answer.seconds)
        self._used(Role.PRODUCER, answer.producer, answer.pool)

    def metrics(
        self,
        config: Config,
        shape: ModelShape,
        plan: Plan,
        pace: Pace,
        updates: Mapping[tuple[Role, int], UpdateReport],
    ) -> StepMetrics:
        """What the step did, once it is updated; `pace`: what packs took before."""
        step, result = self.step, self.result
        assert result is not None, f"step {step.index} is recorded before its update"
        survivors = [sample for sample in step.samples if sample.position not in self.bad]
        costs: dict[int, float] = {}
        for pack in step.packs:
            _add(costs, pack.rank, pack.cost)
        whole = [pack for pack in step.packs if pack.cost and not any(s.position in self.bad for s in pack.samples)]
        times = [(pack.cost, self.pack_seconds[pack.slot, pack.rank]) for pack in whole]
        producers = range(len(plan.producers.leading))
        waited = {rank: report.waited for (role, rank), report in updates.items() if role is Role.CONSUMER}
        consumers = {dp: waited[rank.rank] for dp, rank in enumerate(plan.consumers.leading) if rank.rank in waited}
        return StepMetrics(
            step=step.index,
            epoch=step.epoch,
            rows=len(survivors),
            text_tokens=sum(sample.text_tokens for sample in survivors),
            vision_tokens=sum(sample.vision_tokens for sample in survivors),
            trained_tokens=result.trained_tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            module_norms={module: result.module_norm(module) for module in result.square_sums},
            lr=self.lr,
            seconds=self.seconds,
            num_packs=len(step.packs),
            capacity_tokens=len(step.packs) * config.packing.max_tokens,
            starvation=self.starvation,
            gradient_wait=consumers if config.trainable_encoder else {},
            stall=self.stall,
            producer_seconds={rank: self.producer_seconds.get(rank, 0.0) for rank in producers},
            consumer_seconds=self.consumer_seconds,
            predicted_costs=costs,
            encode_costs={rank: self.encode_costs.get(rank, 0) for rank in producers},
            cost_error=pace.error(self.choice, times),
            pool_bytes_in=self.bytes_in,
            pool_bytes_out=self.bytes_out,
            pool_written=self.pool_written,
            pool_read=self.pool_read,
            pool_seconds=self.pool_seconds,
            pool_pinned=self.pool_pinned,
            pool_occupancy=self.occupancy,
            max_memory_bytes=max(report.max_memory_bytes for report in updates.values()),
            flops=step_flops(shape, survivors, config.frozen),
            palm_flops=palm_flops(shape.text, [sample.tokens for sample in survivors]),
            eval_loss=self.eval_loss,
            skipped=Counter(row.reason for row in (*self.skipped, *self.bad.values())),
            applied=result.applied,
        )

    def _used(self, role: Role, rank: int, pool: PoolUse) -> None:
        """What a rank did with the pool for one order."""
        self.pool_written.update(pool.bytes_in)
        self.pool_read.update(pool.bytes_out)
        self.pool_pinned[role, rank] = pool.pinned_bytes
        self.pool_seconds[role, rank] = self.pool_seconds.get((role, rank), 0.0) + pool.seconds


def _add(sums: dict[int, Any], rank: int, value: float) -> None:
    sums[rank] = sums.get(rank, 0) + value
