"""What was measured of one step, and its record.

controller's measurements ──▶ StepMetrics ──to_record──▶ {"step": 7, "loss_metrics/global_avg_loss": …, …}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.mfu import Fleet
from flowtrain.telemetry.registry import Metric, Reduce, Tally
from flowtrain.types import Module, Role

if TYPE_CHECKING:
    from flowtrain.flops import StepFlops

GIB = 2**30
MOST_LOADS = 16
"""Ranks of a side whose loads stand in the record."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step as the controller measured it. Mappings by rank hold every rank of their side.

    Attributes:
        rows: rows that trained (bad ones left out).
        loss: mean over the step's surviving trained tokens; without one it is not known, and null in the record.
        grad_norm: over all modules, before clipping; of the mean loss.
        module_norms: the same of each module that a sample reached.
        seconds: from the end of the step before to the end of this one.
        starvation: seconds that each consumer rank waited for features.
        gradient_wait: seconds that each consumer rank waited for the encoder's gradients before its update.
        stall: seconds that each producer rank waited for room or orders.
        producer_seconds: busy seconds of each producer rank.
        consumer_seconds: busy seconds of each consumer rank: the measured load of the packs.
        predicted_costs: predicted cost of each consumer rank's packs, in the cost model's unit.
        encode_costs: the same of the units that each producer rank encoded.
        cost_error: mean relative error of the predicted time of a pack, where packs have a pace to predict by.
        pool_bytes_in: bytes of features that producers put; `pool_bytes_out`: bytes of them that consumers got.
        pool_written: bytes written into the pool by each transport, gradients included.
        pool_read: bytes read out of the pool by each transport.
        pool_seconds: in calls of the pool, of each rank of both sides.
        pool_pinned: bytes that each rank has page-locked.
        pool_occupancy: largest used share of the pool seen, 0 to 1.
        num_packs: packs of all ranks; `capacity_tokens`: what they could hold.
        palm_flops: training FLOPs of the backbone by the PaLM paper's formula.
        skipped: rows read and not trained, by reason.
        telemetry_seconds: processor time that telemetry took on the controller.
        applied: False when the update was left out (non-finite, or no trained token).
        of_run: what the controller knows beside the step: its plan, its last step, the devices.
    """

    step: int
    epoch: int
    rows: int
    text_tokens: int
    vision_tokens: int
    trained_tokens: int
    loss: float
    grad_norm: float
    module_norms: Mapping[Module, float]
    lr: Mapping[Module, float]
    seconds: float
    num_packs: int
    capacity_tokens: int
    starvation: Mapping[int, float] = field(default_factory=dict)
    gradient_wait: Mapping[int, float] = field(default_factory=dict)
    stall: Mapping[int, float] = field(default_factory=dict)
    producer_seconds: Mapping[int, float] = field(default_factory=dict)
    consumer_seconds: Mapping[int, float] = field(default_factory=dict)
    predicted_costs: Mapping[int, float] = field(default_factory=dict)
    encode_costs: Mapping[int, float] = field(default_factory=dict)
    cost_error: float | None = None
    pool_bytes_in: int = 0
    pool_bytes_out: int = 0
    pool_written: Mapping[str, int] = field(default_factory=dict)
    pool_read: Mapping[str, int] = field(default_factory=dict)
    pool_seconds: Mapping[tuple[Role, int], float] = field(default_factory=dict)
    pool_pinned: Mapping[tuple[Role, int], int] = field(default_factory=dict)
    pool_occupancy: float | None = None
    max_memory_bytes: int | None = None
    flops: StepFlops | None = None
    palm_flops: float | None = None
    fleet: Fleet | None = None
    eval_loss: float | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    telemetry_seconds: float | None = None
    applied: bool = True
    of_run: Mapping[Metric, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.step >= 1, f"steps are counted from 1, not {self.step}"
        assert self.seconds >= 0, f"step {self.step} took {self.seconds} s"

    @property
    def tokens(self) -> int:
        return self.text_tokens + self.vision_tokens

    @property
    def fill(self) -> float | None:
        """Used share of the packs' token capacity, 0 to 1."""
        return self.tokens / self.capacity_tokens if self.capacity_tokens else None

    @property
    def waiting_share(self) -> float | None:
        """Share of the step, 0 to 1, by which consumers' waiting for the encoder prolonged it.

        Ranks meet at the end of a step, so only the last one's way counts: max(busy + waited), against max(busy) had
        nobody waited. A rank that waits while another is still busy costs nothing.
        """
        if not self.seconds or not self.consumer_seconds:
            return None
        busy = self.consumer_seconds
        waited = {rank: self.starvation.get(rank, 0.0) + self.gradient_wait.get(rank, 0.0) for rank in busy}
        prolonged = max(busy[rank] + waited[rank] for rank in busy) - max(busy.values())
        return min(max(prolonged / self.seconds, 0.0), 1.0)

    def to_record(self) -> dict[str, Any]:
        """The record of metrics.jsonl."""
        measured: dict[Metric, Any] = {
            m.STEP: self.step,
            m.EPOCH: self.epoch,
            m.ROWS: self.rows,
            m.ROWS_SKIPPED: sum(self.skipped.values()),
            m.ROWS_SKIPPED_OF: self.skipped,
            m.TEXT_TOKENS: self.text_tokens,
            m.VISION_TOKENS: self.vision_tokens,
            m.TRAINED_TOKENS: self.trained_tokens,
            m.LOSS: self.loss if self.trained_tokens else None,
            m.LOSS_HEX: float(self.loss).hex(),
            m.GRAD_NORM: self.grad_norm,
            m.GRAD_NORM_OF: {module.value: self.module_norms.get(module) for module in Module},
            m.LR: max(self.lr.values(), default=None),
            m.LR_OF: {module.value: rate for module, rate in self.lr.items()},
            m.APPLIED: self.applied,
            m.NONFINITE: int(self.trained_tokens > 0 and not (isfinite(self.loss) and isfinite(self.grad_norm))),
            m.STEP_SECONDS: self.seconds,
            m.TELEMETRY_SECONDS: self.telemetry_seconds,
            m.MEMORY: None if self.max_memory_bytes is None else self.max_memory_bytes / GIB,
            m.POOL_OCCUPANCY: _percent(self.pool_occupancy),
            m.POOL_BYTES_IN: self.pool_bytes_in,
            m.POOL_BYTES_OUT: self.pool_bytes_out,
            m.POOL_WRITTEN: dict(sorted(self.pool_written.items())),
            m.POOL_READ: dict(sorted(self.pool_read.items())),
            m.POOL_SECONDS: self.pool_seconds,
            m.POOL_PINNED: self.pool_pinned,
            m.PRODUCTION_RATE: _rate(self.vision_tokens, self.producer_seconds),
            m.CONSUMPTION_RATE: _rate(self.vision_tokens, self.consumer_seconds),
            m.STARVATION: self.starvation,
            m.STALL: self.stall,
            m.PACK_FILL: _percent(self.fill),
            m.PACK_IMBALANCE: self.predicted_costs,
            m.PACK_IMBALANCE_MEASURED: self.consumer_seconds,
            m.ENCODE_IMBALANCE: self.encode_costs,
            m.ENCODE_IMBALANCE_MEASURED: self.producer_seconds,
            m.LOAD_OF: _loads(Role.PRODUCER, self.producer_seconds) | _loads(Role.CONSUMER, self.consumer_seconds),
            m.COST_ERROR: _percent(self.cost_error),
            **self._speed(),
            **self.of_run,
        }
        if self.eval_loss is not None:
            measured[m.EVAL_LOSS] = self.eval_loss
        return m.METRICS.record(measured)

    def _speed(self) -> dict[Metric, Any]:
        """Throughput and MFU; null where the fleet or its peak is not known."""
        fleet, seconds, share = self.fleet, self.seconds, self.waiting_share
        speed: dict[Metric, Any] = dict.fromkeys(
            (m.THROUGHPUT, m.TFLOPS, m.MFU, m.MFU_ENCODER, m.MFU_BACKBONE, m.MFU_BACKBONE_PALM, m.MFU_LLM_ONLY)
        )
        speed |= {m.MFU_GAP: _percent(share), m.PEAK_TFLOPS: None, m.PEAK_SOURCE: None, m.FLOPS_OF: {}}
        if self.flops is not None:
            speed[m.FLOPS_OF] = {module.value: self.flops.of(module) for module in Module}
        if fleet is None or not seconds:
            return speed
        speed |= {
            m.THROUGHPUT: self.tokens / seconds / fleet.num_devices,
            m.PEAK_TFLOPS: None if fleet.peak_flops is None else fleet.peak_flops / 1e12,
            m.PEAK_SOURCE: fleet.source,
        }
        if self.flops is None:
            return speed
        found = fleet.mfu(self.flops, seconds, self.palm_flops)
        known = found.backbone is not None and share is not None and share < 1
        return speed | {
            m.TFLOPS: self.flops.total / seconds / fleet.num_devices / 1e12,
            m.MFU: found.all,
            m.MFU_ENCODER: found.encoder,
            m.MFU_BACKBONE: found.backbone,
            m.MFU_BACKBONE_PALM: found.backbone_palm,
            m.MFU_LLM_ONLY: found.backbone / (1 - share) if known else None,  # type: ignore[operator]
        }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def _loads(role: Role, seconds: Mapping[int, float]) -> dict[str, float | None]:
    """By rank, over the mean of the side; a side of one is even, and of many `pack/imbalance_measured` tells."""
    if not 1 < len(seconds) <= MOST_LOADS:
        return {}
    mean = sum(seconds.values()) / len(seconds)
    return {f"{role}-{rank}": spent / mean if mean else None for rank, spent in sorted(seconds.items())}


def _rate(tokens: int, seconds: Mapping[int, float]) -> float | None:
    """Tokens by the mean busy seconds of the ranks."""
    tally = Tally()
    for value in seconds.values():
        tally.add(value)
    mean = tally.value(Reduce.MEAN)
    return tokens / mean if mean else None
