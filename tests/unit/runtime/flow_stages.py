"""Stages without tensors: they do to their rings and blocks what real ones do, and say where the order is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flow_scenarios import payload_of

from flowtrain.messages import (
    BackwardOrder,
    EncodeOrder,
    PackOrder,
    PackTrained,
    ReduceOrder,
    UnitEncoded,
    UnitsReturned,
)
from flowtrain.pool.space import OwnerSpace
from flowtrain.types import Address, EmbeddingRef, Pack, Phase, SkippedRow, UnitId


@dataclass(frozen=True)
class UpdateSent:
    step: int


@dataclass
class Producer:
    """`content`: what lies at each address of this owner's segment."""

    rank: int
    space: OwnerSpace
    content: dict[Address, tuple[str, int]]
    bad: set[int]
    shards: int = 1
    version: int = 0
    kept: dict[UnitId, tuple[EmbeddingRef, ...]] = field(default_factory=dict)
    reduced: list[int] = field(default_factory=list)
    encoded: list[UnitId] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    returned: list[UnitId] = field(default_factory=list)

    def execute(self, order: Any) -> Any:
        match order:
            case EncodeOrder():
                return self.encode(order)
            case BackwardOrder():
                for unit in order.units:
                    self.calls.append(("backward", unit.step))
                    for ref in self.kept.pop(unit):
                        assert self.content[ref.address] == ("gradient", ref.position), "no gradient lies here"
                self.returned += order.units
                return UnitsReturned(order.units, self.rank, seconds=0.0, waited=0.0)
            case ReduceOrder():
                assert not self.kept, f"reduce of step {order.step} before backwards of {list(self.kept)}"
                self.reduced.append(order.step)
            case UpdateSent():
                self.version = order.step
        return order

    def encode(self, order: EncodeOrder) -> UnitEncoded:
        assert not order.keep_graph or order.unit.id.step not in self.reduced, "a unit behind its step's reduce"
        for address in order.free:
            self.space.free(address)
            del self.content[address]
        refs, bad = [], []
        for sample in order.unit.samples:
            num_bytes = payload_of(sample)
            address = self.space.allocate(num_bytes)
            self.space.assert_invariants()
            if sample.position in self.bad:
                self.content[address] = ("nothing", sample.position)
                bad.append(SkippedRow(sample.position, sample.row, sample.id, "image-undecodable", ""))
            else:
                self.content[address] = ("features", sample.position)
                unit = order.unit.id
                refs.append(EmbeddingRef(sample.position, unit, address, num_bytes, (), (), self.version))
        self.encoded.append(order.unit.id)
        self.calls.append(("encode", order.unit.id.step))
        if order.keep_graph and (refs or self.shards > 1):
            self.kept[order.unit.id] = tuple(refs)
        return UnitEncoded(order.unit.id, self.rank, tuple(refs), tuple(bad), 0.0, 0.0)


@dataclass
class Consumer:
    """A pipeline that is done with a pack when `held` - 1 more are there, or the last one of the step."""

    rank: int
    content: dict[Address, tuple[str, int]]
    bad: set[int]
    held: int = 1
    version: int = 0
    packs: list[Pack] = field(default_factory=list)
    open: list[PackOrder] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)

    def execute(self, order: Any) -> Any:
        match order:
            case PackOrder():
                return self.train(order)
            case ReduceOrder():
                assert not self.open, "a reduce before the packs of its step are done"
                self.reduced.append(order.step)
            case UpdateSent():
                self.version = order.step
        return order

    def train(self, order: PackOrder) -> tuple[PackTrained, ...]:
        pack = order.pack
        assert pack.rank == self.rank
        assert order.step not in self.reduced or order.phase is Phase.EVAL, "a pack behind its step's reduce"
        with_images = [s.position for s in pack.samples if s.images]
        assert [ref.position for ref in order.refs] == [p for p in with_images if p not in self.bad]
        assert list(order.masked) == [p for p in with_images if p in self.bad]
        self.packs.append(pack)
        self.open.append(order)
        kept = 0 if order.phase is Phase.EVAL or pack.slot == order.num_slots - 1 else self.held - 1
        done, self.open = self.open[: len(self.open) - kept], self.open[len(self.open) - kept :]
        return tuple(map(self._end, done))

    def _end(self, order: PackOrder) -> PackTrained:
        for ref in order.refs:
            assert self.content[ref.address] == ("features", ref.position), "the features were overwritten"
            if order.return_gradients:
                self.content[ref.address] = ("gradient", ref.position)
        return PackTrained(order.phase, order.step, order.pack.slot, self.rank, 0.0, 1, 0.0, 0.0)
