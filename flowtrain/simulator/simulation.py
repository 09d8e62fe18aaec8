"""Plays a run: the controller's loop over `Flow`, with answers that come when simulated work is done (pure).

       steps ──▶ Flow ──orders──▶ Devices ──Span──▶ heap of answers by time ──▶ controller, one answer after the other
                  ▲                                                                 │
                  └──────────────── encoded, trained, returned, update_sent ◀───────┘

| event | what follows |
|---|---|
| an answer | it waits until the controller is free; then `Flow` hears of it, and of all that have come meanwhile |
| the last reduction of a step | the update on every rank that trains, and a checkpoint behind it if one is due |
| a failure | what is under way is lost; from the last whole checkpoint on everything runs again |

Invariants: simulated time never goes back; orders to a rank are worked off in the order sent; the same arguments give
the same outcome.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flowtrain.errors import PlanError
from flowtrain.messages import BackwardOrder, EncodeOrder, PackOrder, PackTrained, UnitEncoded, UnitsReturned
from flowtrain.pool.directory import Directory
from flowtrain.runtime.ahead import may_compose
from flowtrain.runtime.flow import Flow, Order
from flowtrain.simulator.devices import Devices, Span
from flowtrain.simulator.disturbances import Chance, Disturbances
from flowtrain.simulator.outcome import Outcome, RankSpan, StepRecord
from flowtrain.simulator.shared_cores import SharedCores
from flowtrain.simulator.system import System
from flowtrain.simulator.timing import StepSeconds, Timing
from flowtrain.types import EmbeddingRef, EncodeUnit, Phase, Role, Step

SIDES = (Role.PRODUCER, Role.CONSUMER)


@dataclass(slots=True)
class Played:
    """A step that is under way, or that may have to run again."""

    step: Step
    seconds: StepSeconds
    record: StepRecord
    reduced: int = 0
    trained_packs: set[int] = field(default_factory=set)
    """Consumers whose first pack, which fills the pipeline, was sent."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Whose spans are kept: the first `ranks` of either side, in the first `steps` steps."""

    ranks: int = 0
    steps: int = 0


class Simulation:
    """See the module's page.

    >>> outcome = Simulation(system, timing, composed_steps(spec, cost, rows)).run(100)      # doctest: +SKIP
    >>> outcome.figures()["samples_per_second"]                                            # doctest: +SKIP
    812.4
    """

    def __init__(
        self,
        system: System,
        timing: Timing,
        steps: Iterable[Step],
        disturbances: Disturbances | None = None,
        shown: Shown | None = None,
    ) -> None:
        assert system.reduced_roles, "nothing trains"
        assert system.cores is None or disturbances is None or disturbances.device_hours is None, (
            "a failure takes a device, and these ranks share theirs"
        )
        disturbances = disturbances or Disturbances()
        self.system, self.timing, self.disturbances = system, timing, disturbances
        self._steps: Iterator[Step] = iter(steps)
        self._shown = shown or Shown()
        self._chance = Chance(disturbances, system.num_devices)
        self._slow = {role: disturbances.slow_ranks(system.members(role), role) for role in SIDES}
        self._devices: Devices | SharedCores = (
            Devices(system.num_queues, self._finished)
            if system.cores is None
            else SharedCores(system.num_queues, system.cores, self._finished)
        )
        self._heap: list[tuple[float, int, Any]] = []
        self._num_answers = 0
        self._now = self._up = self._control_seconds = self._lost_seconds = 0.0
        self._failures = 0
        self._failure_at = self._chance.next_failure(0.0)
        self._saved = 0
        self._saves: list[tuple[float, int]] = []
        self._again: list[Played] = []
        self._played: dict[int, Played] = {}
        self._kept: dict[int, Played] = {}
        self._records: dict[int, StepRecord] = {}
        self._spans: list[RankSpan] = []
        self._composed = self._last = 0
        self._flow = self._new_flow(0)

    def run(self, num_steps: int) -> Outcome:
        """Play so many steps, or all where there are fewer.

        Raises:
            PlanError: nothing runs and nothing can, or the pool cannot hold what the exchange keeps in it.
        """
        for _ in self.play(num_steps):
            pass
        return self.outcome()

    def play(self, num_steps: int) -> Iterator[int]:
        """The same, step by step: yields the number of each step that is done (again, where it had been lost)."""
        self._last = num_steps
        while self._flow.version < self._last:
            self._send()
            if not self._flow.version < self._last:
                break
            self._work_on()
            if not self._heap:
                raise PlanError(
                    f"nothing runs and nothing can after {self._now:.6g} simulated seconds "
                    f"({self._flow.waiting()}): raise pool.bytes"
                )
            if self._heap[0][0] > self._failure_at:
                self._fail()
                continue
            before = self._flow.version
            self._take_answers()
            if self._flow.version > before:
                yield self._flow.version
        while (event := self._devices.next_event()) < math.inf:  # the last updates
            self._devices.advance(event)

    def _work_on(self) -> None:
        """Go on until the next answer is on its way."""
        while (event := self._devices.next_event()) < math.inf and not (self._heap and self._heap[0][0] < event):
            self._devices.advance(event)

    def outcome(self) -> Outcome:
        """Of the steps that are done."""
        steps = [self._records[index] for index in sorted(self._records)]
        return Outcome(
            steps,
            steps[-1].end,
            self.system.num_devices,
            self.system.num_consumers,
            self._failures,
            self._lost_seconds,
            self._saved,
            self._num_answers,
            self._control_seconds,
            tuple(self._spans),
        )

    # --- orders -------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while self._composed < self._last and may_compose(self._flow, self._composed):
            played = self._next_step()
            if played is None:
                self._last = self._composed
                break
            self._composed = played.step.index
            self._played[played.step.index] = played
            self._flow.add(played.step)
        for role, rank, order in self._flow.orders():
            self._submit(role, rank, order)

    def _next_step(self) -> Played | None:
        if self._again:
            return self._again.pop(0)
        step = next(self._steps, None)
        if step is None:
            return None
        text, vision = (sum(getattr(s, name) for s in step.samples) for name in ("text_tokens", "vision_tokens"))
        seconds = self.timing.of(step)
        return Played(step, seconds, self._new_record(step.index, step.rows, text, vision, seconds.flops))

    def _new_record(self, index: int, rows: int, text: int, vision: int, flops: float | None) -> StepRecord:
        return StepRecord(index, rows, text, vision, flops, by_consumer=[0.0] * self.system.num_consumers)

    def _submit(self, role: Role, rank: int, order: Order) -> None:
        system = self.system
        match order:
            case EncodeOrder(unit=unit):
                seconds = self._played[unit.id.step].seconds.encode[unit.id]
                group = system.producer_group
            case BackwardOrder(units=units):
                seconds = sum(self._played[unit.step].seconds.backward[unit] for unit in units)
                group = system.producer_group
            case PackOrder(step=index, pack=pack):
                played = self._played[index]
                seconds = played.seconds.packs[pack.slot][rank]
                if rank not in played.trained_packs:
                    played.trained_packs.add(rank)
                    seconds += played.seconds.fill[rank]
                group = system.consumer_group
            case _:
                name = ("reduce", role, order.step)
                self._work(role, rank, self.timing.reduce_seconds(role), order, name, system.members(role))
                return
        meeting = None
        if group > 1:
            self._sent[role][rank] += 1
            meeting = (role, rank // group, self._sent[role][rank])
        self._work(role, rank, seconds * self._chance.factor() * self._slow[role][rank], order, meeting, group)

    def _work(self, role: Role, rank: int, seconds: float, tag: Any, meeting: Any = None, members: int = 1) -> None:
        arrival = self._now + self.system.control.latency_seconds
        self._devices.submit(self.system.device(role, rank), arrival, seconds, (role, rank, tag), meeting, members)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _finished(self, tag: tuple[Role, int, Any], span: Span) -> None:
        """A device is done with something; its answer is on the way."""
        role, rank, order = tag
        seconds = span.end - span.start
        match order:
            case EncodeOrder():
                kind, index = "encode", order.unit.id.step
            case BackwardOrder():
                kind, index = "backward", order.units[0].step
            case PackOrder():
                kind, index = "train", order.step
            case (str() as kind, int() as index):
                pass
            case _:
                kind, index = "reduce", order.step
        played = self._played.get(index)
        record = played.record if played is not None else self._records[index]
        if kind == "train":
            record.by_consumer[rank] += seconds
            record.starvation += span.idle
            record.lock_step += span.start - span.ready
        elif kind in ("encode", "backward"):
            record.producer_seconds += seconds
            record.stall += span.idle
        elif kind == "reduce" and role is Role.CONSUMER:
            record.reduce_wait += span.start - span.ready
        elif kind == "update":
            record.end = max(record.end, span.end)
            record.update_wait += span.idle / self.system.num_consumers if role is Role.CONSUMER else 0.0
        if rank < self._shown.ranks and index <= self._shown.steps:
            self._spans.append(RankSpan(role, rank, kind, index, span.start, span.end))
        if kind == "save":
            self._saves[-1] = (max(self._saves[-1][0], span.end), index)
        elif kind != "update":
            self._num_answers += 1
            arrival = span.end + self.system.control.latency_seconds
            heapq.heappush(self._heap, (arrival, self._num_answers, (role, rank, order, seconds)))

    def _take_answers(self) -> None:
        """The next answer, and all that come while the controller is busy."""
        busy = self.system.control.answer_seconds
        heap = self._heap
        self._now = max(self._now, heap[0][0])
        while heap and heap[0][0] <= self._now:
            role, rank, order, seconds = heapq.heappop(heap)[2]
            self._now += busy
            self._control_seconds += busy
            self._devices.advance(self._now)
            self._tell(role, rank, order, seconds)

    def _tell(self, role: Role, rank: int, order: Order, seconds: float) -> None:
        flow = self._flow
        match order:
            case EncodeOrder(unit=unit):
                flow.encoded(UnitEncoded(unit.id, rank, self._refs(unit), (), seconds, 0.0))
                index = unit.id.step
            case PackOrder(phase=phase, step=index, pack=pack):
                trained = sum(sample.trained_tokens for sample in pack.samples)
                flow.trained(PackTrained(phase, index, pack.slot, rank, 0.0, trained, seconds, 0.0))
            case BackwardOrder(units=units):
                flow.returned(UnitsReturned(units, rank, seconds, 0.0))
                index = units[0].step
            case _:
                index = order.step
                self._played[index].reduced += 1
        wanted = sum(self.system.members(of) for of in self.system.reduced_roles)
        if index == flow.version + 1 and self._played[index].reduced == wanted and flow.finished((Phase.TRAIN, index)):
            self._update(index)

    def _refs(self, unit: EncodeUnit) -> tuple[EmbeddingRef, ...]:
        addresses = self._flow.directory.addresses(unit.id)
        return tuple(
            EmbeddingRef(s.position, unit.id, address, self.system.payload_bytes(s), (), (), self._flow.version)
            for s, address in zip(unit.samples, addresses, strict=True)
        )

    def _update(self, index: int) -> None:
        """All of a step is in: every rank that trains updates, and saves behind it."""
        system, played = self.system, self._played[index]
        saves = system.save_every is not None and index % system.save_every == 0
        if saves:
            self._saves.append((0.0, index))
        for role in SIDES:
            if role not in system.reduced_roles:
                continue
            for rank in range(system.members(role)):
                self._work(role, rank, self.timing.update_seconds(role), ("update", index))
                if saves:
                    self._work(role, rank, system.save_seconds, ("save", index))
        self._saved += saves
        self._flow.update_sent(index)
        self._flow.forget((Phase.TRAIN, index))
        played.record.close(system.num_producers)
        self._records[index] = played.record
        if self.disturbances.device_hours is not None:
            whole = max((of for end, of in self._saves if end <= self._now), default=0)
            self._kept = {of: kept for of, kept in self._kept.items() if of > whole}
            self._kept[index] = played
        del self._played[index]

    # --- failures -----------------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """A device is lost: the run ends, and goes on from the last checkpoint that was whole by then."""
        at = self._failure_at
        whole = [(end, index) for end, index in self._saves if end <= at]
        since, version = max(whole, default=(0.0, 0), key=lambda save: save[1])
        up = at + self.disturbances.restart_seconds
        self._saves = [save for save in self._saves if save in whole][-1:]
        self._lost_seconds += up - max(since, self._up)
        self._failures += 1
        again = {**self._kept, **self._played, **{played.step.index: played for played in self._again}}
        self._again = [self._afresh(again[index]) for index in sorted(again) if index > version]
        self._kept = {}
        self._played = {}
        self._records = {index: record for index, record in self._records.items() if index <= version}
        self._heap.clear()
        self._devices.restart(up)
        self._now = up
        self._composed = version
        self._flow = self._new_flow(version)
        self._up = up
        self._failure_at = self._chance.next_failure(up)

    def _afresh(self, played: Played) -> Played:
        old = played.record
        record = self._new_record(old.step, old.rows, old.text_tokens, old.vision_tokens, old.flops)
        return Played(played.step, played.seconds, record)

    def _new_flow(self, version: int) -> Flow:
        """Processes that have just come up, `version` updates in their parameters."""
        system = self.system
        self._sent = {role: [0] * system.members(role) for role in SIDES}
        return Flow(
            Directory(dict.fromkeys(range(system.num_producers), system.segment_bytes)),
            num_producers=system.num_producers,
            num_consumers=system.num_consumers,
            trainable_encoder=system.trainable_encoder,
            reduced_roles=system.reduced_roles,
            exchange=system.exchange,
            payload_bytes=system.payload_bytes,
            version=version,
            shards=system.producer_group,
            packs_held=system.packs_held,
            colocated=system.colocated,
        )
