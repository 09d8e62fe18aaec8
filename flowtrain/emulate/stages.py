"""Reader, producer and consumer whose compute is a wait: the stages' protocol, the pool's real calls, no torch.

| stage | does for real | waits for |
|---|---|---|
| reader | sizes of rows from the run's file, payload blocks of as many token ids as are scaled | – |
| producer | frees, puts every feature byte, reads every gradient byte back | encode, backward, reduce, update |
| consumer | gets and reads every feature byte, looks at its token ids, puts gradients | packs, reduce, update |

A feature's bytes all have one value, that of its row; the gradient over it another one. Whoever reads compares, so a
byte of another row, step or state of the block ends the run. The loss of a pack follows from the rows in it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from flowtrain.config.schema import Config
from flowtrain.data.blocks import BlockRead, PayloadBlock, payload_number
from flowtrain.data.order import Order
from flowtrain.emulate.meeting import Meeting, pause_until
from flowtrain.emulate.seconds import Seconds
from flowtrain.messages import (
    BackwardOrder,
    EncodeOrder,
    PackOrder,
    PackTrained,
    ReduceOrder,
    ReduceReport,
    UnitEncoded,
    UnitsReturned,
    UpdateOrder,
    UpdateReport,
)
from flowtrain.pool.client import PoolClient, Put
from flowtrain.shapes import feature_specs, payload_bytes
from flowtrain.telemetry.spans import Span
from flowtrain.types import EmbeddingRef, EncodeUnit, FeatureSpec, Module, Phase, Role, SampleMeta, UnitId


def feature_value(position: int) -> int:
    """Of every byte of a row's features; its gradient has the complement."""
    return 1 + position % 120


def scaled_tokens(tokens: int, scale: float) -> int:
    """Token ids that stand for so many."""
    return max(1, round(tokens * scale))


class EmulatedReader:
    """`rows`: sizes, in the order of the run's file."""

    def __init__(self, config: Config, rows: Sequence[SampleMeta], byte_scale: float) -> None:
        self._rows = rows
        self._order = Order.of(config, len(rows))
        self._scale = byte_scale

    def read(self, phase: Phase, start: int, count: int, block: int) -> tuple[BlockRead, PayloadBlock]:
        """Rows at positions [start, start + count)."""
        assert phase is Phase.TRAIN, "held-out rows are not emulated"
        number = payload_number(phase, block)
        asked = islice(self._order.rows(self._rows, start), count)
        rows = [row._replace(block=number, place=place) for place, row in enumerate(asked)]
        starts = np.zeros(count + 1, np.int64)
        starts[1:] = np.cumsum([scaled_tokens(row.tokens, self._scale) for row in rows])
        ids, trained = np.zeros(int(starts[-1]), np.int32), np.ones(int(starts[-1]), np.bool_)
        return BlockRead(phase, number, start, tuple(rows)), PayloadBlock(ids, trained, starts)

    def first_sample(self) -> str | None:
        return None

    def close(self) -> None:
        self._rows = ()


@dataclass(slots=True)
class Device:
    """What a producer and a consumer have in common: seconds, a place among devices that work together, the pool.

    `meeting`: of those that work together, among them all that read the same features: when their work ends, each has
    read. One of these `leads`: it answers for all and writes gradients. `trained`: modules that train here.
    """

    role: Role
    rank: int
    config: Config
    seconds: Seconds
    pool: PoolClient
    meeting: Meeting
    trained: tuple[Module, ...]
    byte_scale: float
    features: tuple[FeatureSpec, ...]
    leads: bool
    reads: bool
    span: Span
    version: int = 0
    _works: int = 0
    _idle_since: float = field(default_factory=time.perf_counter)

    def work(self, kind: str, ready: float, seconds: float) -> None:
        """Pass the time of a unit, backward or pack, that could begin at `ready`."""
        self._works += 1
        with self.span(kind):
            pause_until(self.meeting.end_of(self._works, ready, seconds, self.config.run.timeout_seconds))

    def idle(self, start: float) -> float:
        """Seconds without work before `start`."""
        return start - self._idle_since

    def done(self) -> float:
        """The moment from which the device is idle."""
        self._idle_since = time.perf_counter()
        return self._idle_since

    def reduce(self, order: ReduceOrder) -> ReduceReport:
        pause_until(time.perf_counter() + self.seconds.reduce_seconds(self.role))
        self.done()
        return ReduceReport(order.step, dict.fromkeys(self.trained, 1.0))

    def update(self, order: UpdateOrder) -> UpdateReport:
        start = time.perf_counter()
        pause_until(start + self.seconds.update_seconds(self.role))
        waited, self.version = self.idle(start), order.step
        self.done()
        return UpdateReport(order.step, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, waited)

    def close(self) -> None:
        self.pool.close()


@dataclass(slots=True)
class EmulatedProducer(Device):
    _kept: dict[UnitId, tuple[EncodeUnit, tuple[EmbeddingRef, ...]]] = field(default_factory=dict)

    def encode(self, order: EncodeOrder) -> UnitEncoded:
        start = time.perf_counter()
        waited = self.idle(start)
        unit = order.unit
        if self.leads:
            self.pool.free(order.free)
        self.work("encode", start, self.seconds.encode(unit))
        refs = self._put(order) if self.leads else ()
        if order.keep_graph:
            self._kept[unit.id] = (unit, refs)
        return UnitEncoded(unit.id, self.rank, refs, (), self.done() - start, waited, self.pool.use())

    def backward(self, order: BackwardOrder) -> UnitsReturned:
        start = time.perf_counter()
        waited = self.idle(start)
        seconds = 0.0
        for unit in order.units:
            kept, refs = self._kept.pop(unit)
            seconds += self.seconds.backward(kept)
            for ref, gradients in zip(refs, self.pool.gradients(refs), strict=True):
                check_bytes(gradients, 255 - feature_value(ref.position), f"the gradient of position {ref.position}")
        self.work("backward", start, seconds)
        return UnitsReturned(order.units, self.rank, self.done() - start, waited, self.pool.use())

    def _put(self, order: EncodeOrder) -> tuple[EmbeddingRef, ...]:
        dtype, unit, puts = self.config.model.dtype, order.unit, []
        for sample in unit.samples:
            sizes = (self.features, dtype, sample.vision_tokens, sample.patches)
            value = np.broadcast_to(np.uint8(feature_value(sample.position)), (payload_bytes(*sizes),))
            puts.append(Put(sample.position, feature_specs(*sizes), len(value), [value]))
        addresses = self.pool.put_all(self.version, puts)
        return tuple(
            EmbeddingRef(put.position, unit.id, address, put.payload_bytes, put.specs, (), self.version)
            for put, address in zip(puts, addresses, strict=True)
        )


@dataclass(slots=True)
class EmulatedConsumer(Device):
    def train(self, order: PackOrder, *payloads: PayloadBlock) -> tuple[PackTrained, ...]:
        start = time.perf_counter()
        waited, pack = self.idle(start), order.pack
        seconds = self.seconds.pack(order.step, pack)
        self._check_tokens(order, payloads)
        if self.reads:
            for ref, views in zip(order.refs, self.pool.get_all(order.refs), strict=True):
                assert ref.unit.step == order.step, f"features of step {ref.unit.step} offered to step {order.step}"
                check_bytes(views, feature_value(ref.position), f"the features of position {ref.position}")
        self.work("train", start, seconds)
        if self.reads:
            if order.return_gradients and self.leads:
                gradients = [
                    [np.broadcast_to(np.uint8(255 - feature_value(ref.position)), (ref.bytes,))] for ref in order.refs
                ]
                self.pool.put_gradients(order.refs, gradients)
                self.pool.flush()
            self.pool.release(order.refs)
        trained = sum(sample.trained_tokens for sample in pack.samples)
        loss = float(sum(sample.trained_tokens * (1 + sample.row % 7) for sample in pack.samples))
        taken = self.done() - start
        return (
            PackTrained(order.phase, order.step, pack.slot, self.rank, loss, trained, taken, waited, self.pool.use()),
        )

    def _check_tokens(self, order: PackOrder, payloads: Sequence[PayloadBlock]) -> None:
        blocks = dict(zip(order.blocks, payloads, strict=True))
        for sample in order.pack.samples:
            starts = blocks[sample.block].starts
            found = int(starts[sample.place + 1] - starts[sample.place])
            wanted = scaled_tokens(sample.tokens, self.byte_scale)
            assert found == wanted, f"{found} token ids came for sample {sample.id}, expected {wanted}"


def check_bytes(arrays: Sequence[Any], value: int, what: str) -> None:
    """`AssertionError` unless all bytes have this value."""
    for array in arrays:
        assert not len(array) or int(array.min()) == value == int(array.max()), (
            f"{what} are bytes from {array.min()} to {array.max()}, expected {value}"
        )
