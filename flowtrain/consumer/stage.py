"""The backbone side of a run: one process that runs packs, forward and backward, on features it reads from the pool.

    PackOrder + payload blocks ──▶ token ids, labels ─┐
    pool.get_all(refs) ───────────────────────────────┴─▶ loss ─▶ backward ─▶ gradients over the features ─▶ PackTrained
    ReduceOrder, UpdateOrder ──▶ `flowtrain.update`

A row found bad at decode keeps its place in the pack and takes no part in the computation: samples of a pack never see
each other, so this equals masked labels and zero features, and leaves `grad` None where a plain loop over the surviving
rows would (C2, C3).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.config.schema import Config
from flowtrain.data.reader import PayloadBlock
from flowtrain.messages import PackOrder, PackTrained, ReduceOrder, ReduceReport, UpdateOrder, UpdateReport
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.pool.client import PoolClient
from flowtrain.telemetry.spans import Span, no_span
from flowtrain.types import EmbeddingRef, Phase, SampleMeta
from flowtrain.update.peak import peak_memory_bytes
from flowtrain.update.updater import Updater


@dataclass(slots=True)
class ConsumerStage:
    """`rank` is the data-parallel rank, which may be several processes: `peers` is their group, and the one that
    `leads` answers for all and writes gradients.

    `updater` is None when nothing on this side trains; `span` marks what is done when.
    """

    rank: int
    config: Config
    backbone: BackboneHalf
    pool: PoolClient
    updater: Updater | None
    device: torch.device
    peers: Any = None
    leads: bool = True
    span: Span = no_span
    _idle_since: float = field(default_factory=time.perf_counter)

    def train(self, order: PackOrder, *payloads: PayloadBlock) -> PackTrained:
        """Run one pack; an evaluation pack stops after the loss. `payloads`: those of `order.blocks`."""
        start = time.perf_counter()
        waited = start - self._idle_since
        delay_ms = self.config.debug.delays.consumer_pack_ms.get(self.rank, 0.0)
        if delay_ms:
            time.sleep(delay_ms / 1000)
        pack = order.pack
        tokens = dict(zip(order.blocks, payloads, strict=True))
        refs = {ref.position: ref for ref in order.refs}
        views = dict(zip(refs, self.pool.get_all(order.refs), strict=True))
        survivors = [sample for sample in pack.samples if sample.position not in order.masked]
        samples = [
            self._sample(s, tokens[s.block], refs.get(s.position), views.get(s.position, ()), order) for s in survivors
        ]
        if not samples and self.backbone.is_sharded:
            samples = [self.backbone.stand_in()]
        loss_sum, trained = 0.0, 0
        if samples:
            with self.span("forward"), torch.set_grad_enabled(order.phase is Phase.TRAIN):
                neighbours = "sample_sees_neighbour" in self.config.debug.faults and order.phase is Phase.TRAIN
                loss, trained = self.backbone.loss(samples, neighbours_visible=neighbours)
                loss_sum = float(loss.detach().double())
            if order.phase is Phase.TRAIN and loss.requires_grad:
                with self.span("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
        if self.peers is not None:
            with self.span("peers"):
                dist.barrier(self.peers)  # a gradient goes over the embedding that another peer may still read
        if order.return_gradients and self.leads:
            with self.span("return gradient"):
                pairs = zip(survivors, samples, strict=bool(survivors))
                used = {s.position: inputs.features for s, inputs in pairs if inputs.features is not None}
                self.pool.put_gradients([refs[position] for position in used], [*map(_gradients, used.values())])
                self.pool.flush()
        self.pool.release(order.refs)
        self._idle_since = time.perf_counter()
        seconds = self._idle_since - start
        return PackTrained(
            order.phase, order.step, pack.slot, self.rank, loss_sum, trained, seconds, waited, self.pool.use()
        )

    def reduce(self, order: ReduceOrder) -> ReduceReport:
        assert self.updater is not None, "nothing trains on the consumer side"
        report = ReduceReport(order.step, self.updater.reduce())
        self._idle_since = time.perf_counter()
        return report

    def update(self, order: UpdateOrder) -> UpdateReport:
        assert self.updater is not None, "nothing trains on the consumer side"
        waited = time.perf_counter() - self._idle_since
        self.updater.update(order)
        self._idle_since = time.perf_counter()
        return UpdateReport(order.step, peak_memory_bytes(), waited)

    def close(self) -> None:
        self.pool.close()

    def _sample(
        self,
        sample: SampleMeta,
        block: PayloadBlock,
        ref: EmbeddingRef | None,
        views: Sequence[torch.Tensor],
        order: PackOrder,
    ) -> PackSample:
        tokens = block.sample(sample.place)
        features = None
        if ref is not None:
            assert ref.unit.step == order.step, f"features of step {ref.unit.step} offered to step {order.step}"
            assert not order.return_gradients or ref.version == order.step - 1, (
                f"features of encoder version {ref.version} offered to step {order.step}"
            )
            features = tuple(view.to(self.device).detach().requires_grad_(order.return_gradients) for view in views)
        assert (features is None) == (sample.vision_tokens == 0), f"sample {sample.id} has images and no features"
        return PackSample(
            torch.as_tensor(tokens.input_ids, device=self.device),
            torch.as_tensor(tokens.labels, device=self.device),
            features,
            torch.tensor(ref.grids, dtype=torch.long, device=self.device) if ref is not None and ref.grids else None,
            None if ref is None else ref.playback,
        )


def _gradients(features: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Those of a sample's features; none means zero."""
    return [torch.zeros_like(f) if f.grad is None else f.grad for f in features]
