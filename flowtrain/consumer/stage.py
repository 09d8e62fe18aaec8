"""The backbone side of a run: one process that runs packs, forward and backward, on features it reads from the pool.

    PackOrder + payload blocks ──▶ token ids, labels ─┐
    pool.get_all(refs) ───────────────────────────────┴─▶ PackRun ─▶ gradients over the features ─▶ PackTrained
    ReduceOrder, UpdateOrder ──▶ `flowtrain.update`

An order brings a pack; what is done then is the work of the step's schedule up to the first pack that is not there yet
(`flowtrain.pipeline`): without a pipeline a forward and a backward, in one also those of other packs.

A row found bad at decode keeps its place in the pack and takes no part in the computation: samples of a pack never see
each other, so this equals masked labels and zero features, and leaves `grad` None where a plain loop over the surviving
rows would (C2, C3).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.config.schema import Config
from flowtrain.consumer.pack_run import PackRun
from flowtrain.data.reader import PayloadBlock
from flowtrain.messages import PackOrder, PackTrained, ReduceOrder, ReduceReport, UpdateOrder, UpdateReport
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.parallel.links import Links
from flowtrain.pipeline import Work, schedule
from flowtrain.plan import Layout
from flowtrain.pool.client import PoolClient
from flowtrain.telemetry.spans import Span, no_span
from flowtrain.types import EmbeddingRef, Phase, SampleMeta
from flowtrain.update.peak import peak_memory_bytes
from flowtrain.update.updater import Updater

ALONE = Layout()


@dataclass(slots=True)
class ConsumerStage:
    """`rank` is the data-parallel rank, which may be several processes. Those with the first layers read features:
    `readers` is their group, and the one that `leads` answers for all and writes gradients. With `shares_copies` some
    see what others have copied, and wait for that.

    `updater` is None when nothing on this side trains; `layout` is the side's; `stage` and `links` are those of a
    pipeline, 0 and None without; `span` marks what is done when.
    """

    rank: int
    config: Config
    backbone: BackboneHalf
    pool: PoolClient
    updater: Updater | None
    device: torch.device
    readers: Any = None
    leads: bool = True
    shares_copies: bool = False
    span: Span = no_span
    layout: Layout = ALONE
    stage: int = 0
    links: Links | None = None
    _packs: dict[int, PackRun] = field(default_factory=dict)
    _work: deque[Work] = field(default_factory=deque)
    _idle_since: float = field(default_factory=time.perf_counter)
    _waited: float = 0.0
    """Seconds idle before orders to train, not yet told: an order may end several packs, or none."""

    def train(self, order: PackOrder, *payloads: PayloadBlock) -> tuple[PackTrained, ...]:
        """Take a pack, and do what can be done with it; returns what is done with. `payloads`: those of `order.blocks`.

        An evaluation pack stops after the loss.
        """
        start = since = time.perf_counter()
        self._waited += start - self._idle_since
        delay_ms = self.config.debug.delays.consumer_pack_ms.get(self.rank, 0.0)
        if delay_ms:
            time.sleep(delay_ms / 1000)
        self._packs[order.pack.slot] = self._begin(order, payloads)
        done = []
        for work in self._due(order):
            run, received = self._packs[work.slot], self._received
            with self.span("forward" if work.forward else "backward"):
                (run.forward if work.forward else run.backward)(work.section)
            now = time.perf_counter()
            run.seconds, since = run.seconds + now - since - (self._received - received), now
            if (run.backwards if run.trains else work.section + 1) == self.layout.vpp:
                done.append(self._end(work.slot, since))
                since = time.perf_counter()
        if not self._work and self.links is not None:
            self.links.flush()
        self._idle_since = time.perf_counter()
        return tuple(done)

    @property
    def _received(self) -> float:
        """Seconds waited for other ranks of the pipeline so far."""
        return 0.0 if self.links is None else self.links.waited_seconds

    def _due(self, order: PackOrder) -> Iterator[Work]:
        """What may be done now that this pack is here."""
        slot = order.pack.slot
        if order.phase is not Phase.TRAIN:
            assert not self._work, f"{len(self._work)} pieces of work of a step are left"
            yield from (Work(True, section, slot) for section in range(self.layout.vpp))
            return
        if not self._work:
            step = schedule(self.stage, self.layout.pp, self.layout.vpp, order.num_slots)
            self._work.extend(work for work in step if work.slot >= slot)
        while self._work and self._work[0].slot <= slot:
            yield self._work.popleft()

    def _begin(self, order: PackOrder, payloads: Sequence[PayloadBlock]) -> PackRun:
        tokens = dict(zip(order.blocks, payloads, strict=True))
        refs = {ref.position: ref for ref in order.refs}
        views = dict(zip(refs, self._features(order.refs), strict=True)) if self.stage == 0 else {}
        survivors = [sample for sample in order.pack.samples if sample.position not in order.masked]
        samples = [
            self._sample(s, tokens[s.block], refs.get(s.position), views.get(s.position, ()), order) for s in survivors
        ]
        if not samples and self.backbone.is_sharded:
            samples = [self.backbone.stand_in()]
        neighbours = "sample_sees_neighbour" in self.config.debug.faults and order.phase is Phase.TRAIN
        return PackRun(order, survivors, samples, refs, self.backbone, self.links, neighbours)

    def _features(self, refs: Sequence[EmbeddingRef]) -> list[list[torch.Tensor]]:
        """Of each sample; who sees the copies of another reader waits for that one to have made them."""
        shared = self.shares_copies and bool(refs)
        if shared and self.pool.sees_copies:
            self._meet()
        features = self.pool.get_all(refs)
        if shared and not self.pool.sees_copies:
            self._meet()
        return features

    def _meet(self) -> None:
        """Wait for the other readers."""
        if self.readers is not None:
            with self.span("peers"):
                dist.barrier(self.readers)

    def _end(self, slot: int, since: float) -> PackTrained:
        """The pack is done here: gradients go over its features, which nobody reads any more."""
        run = self._packs.pop(slot)
        order = run.order
        if self.stage == 0:
            self._meet()  # what another may still read is written over: by gradients, and once released by other copies
            if order.return_gradients and self.leads:
                with self.span("return gradient"):
                    pairs = zip(run.survivors, run.samples, strict=bool(run.survivors))
                    used = {s.position: inputs.features for s, inputs in pairs if inputs.features is not None}
                    gradients = [*map(_gradients, used.values())]
                    self.pool.put_gradients([run.refs[position] for position in used], gradients)
                    self.pool.flush()
            self.pool.release(order.refs)
        seconds = run.seconds + time.perf_counter() - since
        waited, self._waited = self._waited, 0.0
        return PackTrained(
            order.phase, order.step, slot, self.rank, run.loss_sum, run.trained, seconds, waited, self.pool.use()
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
            if self.stage == 0:
                features = tuple(view.to(self.device).detach().requires_grad_(order.return_gradients) for view in views)
        assert (ref is None) == (sample.vision_tokens == 0), f"sample {sample.id} has images and no features"
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
