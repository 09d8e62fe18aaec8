"""The encoder side of a run: one process that encodes units into its own segment and takes gradients back.

    EncodeOrder ──▶ free blocks ──▶ decode, preprocess ──▶ encode ──▶ put, one block a sample ──▶ UnitEncoded
    BackwardOrder ──▶ read gradients from the blocks ──▶ backward, unit by unit ──▶ UnitsReturned
    ReduceOrder, UpdateOrder ──▶ `flowtrain.update`

Where the encoder's parameters are cut over several producers, these encode rounds together: each of them calls the
encoder as often as the one that must most often. What is lacking are calls on a blank picture, of zero gradients.

Invariants: blocks are allocated in the order of the unit's samples, one for each, bad rows included (the controller's
ring does the same); backwards run in the order of the order; between two updates every unit is encoded with the same
parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.config.schema import Config
from flowtrain.data.images import BadImage, EncoderInputs
from flowtrain.errors import DataError, PlanError
from flowtrain.messages import (
    BackwardOrder,
    EncodeOrder,
    ReduceOrder,
    ReduceReport,
    UnitEncoded,
    UnitsReturned,
    UpdateOrder,
    UpdateReport,
)
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.half import torch_dtype
from flowtrain.pool.client import PoolClient, Put
from flowtrain.producer import faults
from flowtrain.shapes import feature_specs, payload_bytes
from flowtrain.telemetry.spans import Span, no_span
from flowtrain.types import EmbeddingRef, EncodeUnit, FeatureSpec, Phase, SampleMeta, SkippedRow, TensorSpec, UnitId
from flowtrain.update.peak import peak_memory_bytes
from flowtrain.update.updater import Updater

Inputs = Mapping[str, torch.Tensor]
Features = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Kept:
    """What the backward of a unit needs: its graph (`keep`) or its inputs (`recompute`).

    `blank`: calls on a blank picture; their features come last.
    """

    refs: tuple[EmbeddingRef, ...]
    features: list[Features] | None
    inputs: list[Inputs]
    blank: int


@dataclass(slots=True)
class ProducerStage:
    """`rank` is the data-parallel rank, which may be several processes: `peers` is their group. All of them encode; the
    one that `leads` answers, puts features into the pool and hands their gradients to the others.

    `updater` is None when nothing on this side trains; `sources` holds the images of each phase; `span` marks what is
    done when; `most(number)` is the largest over the producers that encode together.
    """

    rank: int
    config: Config
    encoder: EncoderHalf
    pool: PoolClient
    sources: Mapping[Phase, EncoderInputs]
    updater: Updater | None
    features: tuple[FeatureSpec, ...]
    peers: Any = None
    leads: bool = True
    span: Span = no_span
    most: Callable[[int], int] = int
    version: int = 0
    _kept: dict[UnitId, _Kept] = field(default_factory=dict)
    _stale: dict[str, torch.Tensor] | None = None
    _swapped: bool = False
    _blank: Inputs | None = None
    _idle_since: float = field(default_factory=time.perf_counter)

    def encode(self, order: EncodeOrder) -> UnitEncoded:
        """Encode the rows whose images can be used; a row that cannot is reported, its block stays unused."""
        start = time.perf_counter()
        waited = start - self._idle_since
        self._sleep()
        if self.leads:
            self.pool.free(order.free)
        unit = order.unit
        inputs, bad = self._load(unit)
        planted = self.config.debug.faults
        if "images_swapped" in planted and not self._swapped:
            self._swapped = faults.swap_images([inputs[s.position] for s in unit.samples if s.position in inputs])
        good = [sample for sample in unit.samples if sample.position in inputs]
        given = [inputs[s.position] for s in good]
        blank = self._lacking_calls(given)
        encoded = self._encode(given, blank, grad=order.keep_graph and self._keeps_graph)
        by_position = dict(zip((s.position for s in good), encoded[: len(good)], strict=True))
        with self.span("put"):
            refs = self._put(unit, by_position, inputs) if self.leads else ()
        if order.keep_graph and (encoded or self.encoder.is_sharded):
            graph = encoded if self._keeps_graph else None
            self._kept[unit.id] = _Kept(refs, graph, [] if graph else given, blank)
        self._idle_since = time.perf_counter()
        return UnitEncoded(unit.id, self.rank, refs, tuple(bad), self._idle_since - start, waited, self.pool.use())

    def backward(self, order: BackwardOrder) -> UnitsReturned:
        """Run the backwards of these units, in this order, on the gradients that lie over their features."""
        start = time.perf_counter()
        waited = start - self._idle_since
        for unit in order.units:
            kept = self._kept.pop(unit)
            features = kept.features or self._encode(kept.inputs, kept.blank, grad=True)
            num_own = len(features) - kept.blank
            gradients = self._gradients(kept.refs, features[:num_own])
            gradients += [[torch.zeros_like(f) for f in of_call] for of_call in features[num_own:]]
            planted = "image_gradient_dropped" in self.config.debug.faults and unit.step == 1 and unit.number == 0
            if planted and kept.refs:
                faults.drop_image_gradient(kept.refs[0], gradients[0])
            pairs = [
                (feature, gradient.to(feature.device, feature.dtype))
                for of_sample, grads in zip(features, gradients, strict=True)
                for feature, gradient in zip(of_sample, grads, strict=True)
                if feature.requires_grad
            ]
            if not pairs:
                continue
            with self.span("backward"):
                torch.autograd.backward([f for f, _ in pairs], [g for _, g in pairs])
        self._idle_since = time.perf_counter()
        return UnitsReturned(order.units, self.rank, self._idle_since - start, waited, self.pool.use())

    def reduce(self, order: ReduceOrder) -> ReduceReport:
        assert self.updater is not None, "nothing trains on the producer side"
        assert not self._kept, f"reduce of step {order.step} before the backward of {list(self._kept)}"
        if "encoder_gradient_doubled" in self.config.debug.faults:
            faults.double_encoder_gradient(self.encoder)
        return ReduceReport(order.step, self.updater.reduce())

    def update(self, order: UpdateOrder) -> UpdateReport:
        assert self.updater is not None, "nothing trains on the producer side"
        if "stale_encoder" in self.config.debug.faults:
            self._stale = {name: p.detach().clone() for name, p in self.encoder.parameters_by_name().items()}
        self.updater.update(order)
        self.version = order.step
        self._idle_since = time.perf_counter()
        return UpdateReport(order.step, peak_memory_bytes())

    def close(self) -> None:
        self._kept.clear()
        self.pool.close()

    @property
    def _keeps_graph(self) -> bool:
        return self.config.producers.backward == "keep"

    def _load(self, unit: EncodeUnit) -> tuple[dict[int, Inputs], list[SkippedRow]]:
        inputs: dict[int, Inputs] = {}
        bad: list[SkippedRow] = []
        for sample in unit.samples:
            try:
                inputs[sample.position] = self.sources[unit.id.phase].load(sample)
            except BadImage as error:
                if self.config.data.on_bad_sample == "error":
                    raise DataError(
                        f"row {sample.id}: {error.detail} ({error.reason}); repair it, or set data.on_bad_sample: skip"
                    ) from error
                bad.append(SkippedRow(sample.position, sample.row, sample.id, error.reason, error.detail))
        return inputs, bad

    def _lacking_calls(self, inputs: list[Inputs]) -> int:
        """Calls of the encoder by which others that encode this round with us are ahead."""
        if not self.encoder.is_sharded:
            return 0
        calls = self.encoder.num_calls(inputs)
        return self.most(calls) - calls

    def _encode(self, inputs: list[Inputs], blank: int, grad: bool) -> list[Features]:
        """Features of these samples, then those of so many calls on a blank picture."""
        if not inputs and not blank:
            return []
        if blank and self._blank is None:
            self._blank = self.sources[Phase.TRAIN].blank()
        with self.span("encode"), torch.set_grad_enabled(grad), faults.stale_parameters(self.encoder, self._stale):
            return self.encoder.encode(inputs, [self._blank] * blank if self._blank is not None else [])

    def _gradients(self, refs: Sequence[EmbeddingRef], features: list[Features]) -> list[list[torch.Tensor]]:
        """Those of each sample's features: from the pool, or from the peer that reads them there."""
        if self.peers is None:
            return self.pool.gradients(refs)
        if self.leads:
            of_samples = [[gradient.clone() for gradient in grads] for grads in self.pool.gradients(refs)]
        else:
            dtype = torch_dtype(self.config.model.dtype)  # that of the pool, which features had not yet
            of_samples = [[torch.empty(f.shape, dtype=dtype) for f in of_sample] for of_sample in features]
        for gradient in (gradient for grads in of_samples for gradient in grads):
            dist.broadcast(gradient, group=self.peers, group_src=0)
        return of_samples

    def _put(
        self, unit: EncodeUnit, encoded: Mapping[int, Features], inputs: Mapping[int, Inputs]
    ) -> tuple[EmbeddingRef, ...]:
        """A block for each sample; references to those that hold features."""
        dtype, puts = self.config.model.dtype, []
        for sample in unit.samples:
            specs = feature_specs(self.features, dtype, sample.vision_tokens, sample.patches)
            num_bytes = payload_bytes(self.features, dtype, sample.vision_tokens, sample.patches)
            tensors = encoded.get(sample.position)
            laid_out = None if tensors is None else self._laid_out(sample, specs, tensors)
            puts.append(Put(sample.position, specs, num_bytes, laid_out))
        refs = []
        for put, address in zip(puts, self.pool.put_all(self.version, puts), strict=True):
            if put.tensors is None:
                continue
            of_sample = inputs[put.position]
            playback = self.encoder.playback(of_sample, encoded[put.position])
            grids = tuple((int(t), int(h), int(w)) for t, h, w in of_sample.get("image_grid_thw", ()))
            refs.append(
                EmbeddingRef(
                    put.position, unit.id, address, put.payload_bytes, put.specs, grids, self.version, playback
                )
            )
        return tuple(refs)

    def _laid_out(self, sample: SampleMeta, specs: tuple[TensorSpec, ...], tensors: Features) -> Features:
        """As rows; a family whose features are not those that the plan sized the pool for is refused, not cut short."""
        rows = tuple(tensor.flatten(0, -2) for tensor in tensors)
        made, planned = [tuple(tensor.shape) for tensor in rows], [spec.shape for spec in specs]
        if made != planned:
            raise PlanError(
                f"row {sample.id}: the encoder made features of {made}, the pool has room for {planned}; "
                "this model cannot be cut as configured: change train.freeze, or use another model"
            )
        return rows

    def _sleep(self) -> None:
        """A planted delay (`debug.delays`), to show that nothing depends on timing."""
        delay_ms = self.config.debug.delays.producer_unit_ms.get(self.rank, 0.0)
        if delay_ms:
            time.sleep(delay_ms / 1000)
