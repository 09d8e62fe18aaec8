"""What is measured of one step, and the one place where metrics.jsonl gets its names (contracts C11 and C12).

    controller's measurements ──▶ StepMetrics ──to_record──▶ {"step": 7, "loss_metrics/global_avg_loss": …, …}

A value that is not known is None and stays null in the file: never a false 0 (T08). Tokens are counted apart: text,
vision and trained (T04); there is no padding. No metric needs a collective (T06).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowtrain.telemetry.mfu import Fleet
from flowtrain.types import Module, Role

if TYPE_CHECKING:
    from flowtrain.flops import StepFlops

GIB = 2**30

LOSS = "loss_metrics/global_avg_loss"
LOSS_HEX = "loss_hex"
EVAL_LOSS = "validation_metrics/loss"
GRAD_NORM = "grad_norm"
THROUGHPUT = "throughput(tps)"
TFLOPS = "tflops"
MFU = "mfu(%)"
MFU_ENCODER = "mfu/encoder(%)"
MFU_BACKBONE = "mfu/backbone(%)"
STEP_SECONDS = "time_metrics/end_to_end(s)"
MEMORY = "memory/max_active(GiB)"
POOL_OCCUPANCY = "pool/occupancy(%)"
POOL_BYTES_IN = "pool/bytes_in"
POOL_BYTES_OUT = "pool/bytes_out"
POOL_SECONDS = "pool/seconds"
POOL_PINNED = "pool/pinned_bytes"
PRODUCTION_RATE = "flow/production_rate"
CONSUMPTION_RATE = "flow/consumption_rate"
STARVATION = "flow/starvation(s)"
STALL = "flow/stall(s)"
PACK_FILL = "pack/fill(%)"
PACK_IMBALANCE = "pack/imbalance"
PACK_IMBALANCE_MEASURED = "pack/imbalance_measured"
ENCODE_IMBALANCE = "pack/imbalance_encoder"
ENCODE_IMBALANCE_MEASURED = "pack/imbalance_encoder_measured"
COST_ERROR = "pack/cost_error(%)"


def imbalance(loads: Mapping[int, float]) -> float | None:
    """Largest load over the mean load; 1.0 is even, None when nobody has any."""
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total > 0 else None


def mean(values: Mapping[int, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


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
        pool_pinned_bytes: bytes that all ranks have page-locked, each counted as often as it is.
        pool_occupancy: largest used share of the pool seen, 0 to 1.
        num_packs: packs of all ranks; `capacity_tokens`: what they could hold.
        applied: False when the update was left out (non-finite, or no trained token).
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
    pool_pinned_bytes: int = 0
    pool_occupancy: float | None = None
    max_memory_bytes: int | None = None
    flops: StepFlops | None = None
    fleet: Fleet | None = None
    eval_loss: float | None = None
    num_skipped: int = 0
    applied: bool = True

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

    def to_record(self) -> dict[str, Any]:
        """The record of metrics.jsonl."""
        record: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "rows": self.rows,
            "rows/skipped": self.num_skipped,
            "tokens/text": self.text_tokens,
            "tokens/vision": self.vision_tokens,
            "tokens/trained": self.trained_tokens,
            LOSS: self.loss if self.trained_tokens else None,
            LOSS_HEX: float(self.loss).hex(),
            GRAD_NORM: self.grad_norm,
            **{f"grad_norm/{module.value}": self.module_norms.get(module) for module in Module},
            "lr": max(self.lr.values(), default=None),
            **{f"lr/{module.value}": rate for module, rate in self.lr.items()},
            "update_applied": self.applied,
            STEP_SECONDS: self.seconds,
            MEMORY: None if self.max_memory_bytes is None else self.max_memory_bytes / GIB,
            POOL_OCCUPANCY: _percent(self.pool_occupancy),
            POOL_BYTES_IN: self.pool_bytes_in,
            POOL_BYTES_OUT: self.pool_bytes_out,
            **{f"{POOL_BYTES_IN}/{name}": num_bytes for name, num_bytes in sorted(self.pool_written.items())},
            **{f"{POOL_BYTES_OUT}/{name}": num_bytes for name, num_bytes in sorted(self.pool_read.items())},
            POOL_SECONDS: max(self.pool_seconds.values(), default=None),
            POOL_PINNED: self.pool_pinned_bytes,
            PRODUCTION_RATE: _rate(self.vision_tokens, mean(self.producer_seconds)),
            CONSUMPTION_RATE: _rate(self.vision_tokens, mean(self.consumer_seconds)),
            STARVATION: mean(self.starvation),
            STALL: mean(self.stall),
            PACK_FILL: _percent(self.fill),
            PACK_IMBALANCE: imbalance(self.predicted_costs),
            PACK_IMBALANCE_MEASURED: imbalance(self.consumer_seconds),
            ENCODE_IMBALANCE: imbalance(self.encode_costs),
            ENCODE_IMBALANCE_MEASURED: imbalance(self.producer_seconds),
            COST_ERROR: _percent(self.cost_error),
        }
        record |= self._speed()
        if self.eval_loss is not None:
            record[EVAL_LOSS] = self.eval_loss
        return record

    def _speed(self) -> dict[str, Any]:
        """Throughput and MFU; null where the fleet or its peak is not known."""
        fleet = self.fleet
        if fleet is None or not self.seconds:
            return dict.fromkeys((THROUGHPUT, TFLOPS, MFU, MFU_ENCODER, MFU_BACKBONE))
        speed: dict[str, Any] = {THROUGHPUT: self.tokens / self.seconds / fleet.num_devices}
        if self.flops is None:
            return speed | dict.fromkeys((TFLOPS, MFU, MFU_ENCODER, MFU_BACKBONE))
        shares = fleet.mfu(self.flops, self.seconds)
        return speed | {
            TFLOPS: self.flops.total / self.seconds / fleet.num_devices / 1e12,
            MFU: shares.all,
            MFU_ENCODER: shares.encoder,
            MFU_BACKBONE: shares.backbone,
            "mfu/peak_tflops": fleet.peak_flops / 1e12,
            "mfu/peak_source": fleet.source,
        }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def _rate(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None
