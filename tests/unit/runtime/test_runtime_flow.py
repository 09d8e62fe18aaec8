"""Flow control against stages that answer at any time: it always ends, in the order of need, within the pool.

Who works and whose answer arrives next is drawn for each example (`flow_scenarios`, `flow_stages`); answers of one rank
arrive in order, nothing else is ordered.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from flow_scenarios import Scenario, payload_of, scenarios, segments_for, steps_of
from flow_stages import Consumer, Producer, UpdateSent
from hypothesis import given, settings

from flowtrain.errors import PlanError
from flowtrain.messages import (
    BackwardOrder,
    EncodeOrder,
    PackOrder,
    PackTrained,
    ReduceOrder,
    UnitEncoded,
    UnitsReturned,
)
from flowtrain.pool.address import owner_of
from flowtrain.pool.block import HEADER_BYTES, block_bytes
from flowtrain.pool.directory import Directory
from flowtrain.pool.space import OwnerSpace
from flowtrain.runtime.exchange import exchange_of
from flowtrain.runtime.flow import Flow
from flowtrain.runtime.flow_producers import DEPTH
from flowtrain.types import Address, Phase, Role, Step, UnitId

Rank = tuple[Role, int]


class Run:
    """The controller's loop over stages whose work and answers come in an order that dice decide."""

    def __init__(self, scenario: Scenario, segments: dict[int, int] | None = None) -> None:
        self.scenario = scenario
        self.dice = random.Random(scenario.seed)
        self.steps = steps_of(scenario)
        self.segments = segments = segments or segments_for(scenario, self.steps)
        pictured = [s.position for step in self.steps for s in step.samples if s.images]
        self.bad = {position for position in pictured if self.dice.random() < scenario.bad_share}
        content: dict[Address, tuple[str, int]] = {}
        self.producers = [
            Producer(rank, OwnerSpace(rank, size), content, self.bad, scenario.shards)
            for rank, size in segments.items()
        ]
        self.consumers = [Consumer(rank, content, self.bad, scenario.held) for rank in range(scenario.num_consumers)]
        self.stages: dict[Rank, Producer | Consumer] = {(Role.PRODUCER, p.rank): p for p in self.producers}
        self.stages |= {(Role.CONSUMER, c.rank): c for c in self.consumers}
        self.directory = Directory(segments)
        self.flow = Flow(
            self.directory,
            num_producers=scenario.num_producers,
            num_consumers=scenario.num_consumers,
            trainable_encoder=scenario.trainable,
            reduced_roles=scenario.reduced_roles,
            payload_bytes=payload_of,
            exchange=exchange_of(scenario.exchange, colocated=False, prefill=scenario.prefill),
            shards=scenario.shards,
            colocated=scenario.colocated,
            packs_held=scenario.held,
        )
        self.orders: dict[Rank, deque[Any]] = {rank: deque() for rank in self.stages}
        self.answers: dict[Rank, deque[Any]] = {rank: deque() for rank in self.stages}
        moves = [(kind, rank) for kind in ("work", "answer") for rank in self.stages]
        self.speeds = {move: self.dice.choice([1.0, 0.3, 0.03]) for move in moves}
        self.todo = deque(self.steps)
        self.open: list[Step] = []
        self.reports: Counter[int] = Counter()
        self.sent: list[tuple[Role, int, Any]] = []
        self.encoded: set[UnitId] = set()
        self.trained: set[tuple[Phase, int, int, int]] = set()

    def reduced_ranks(self) -> list[Rank]:
        return [rank for rank in self.stages if rank[0] in self.scenario.reduced_roles]

    def run(self) -> None:
        self._compose_and_send()
        while self.todo or self.open:
            moves = [("work", rank) for rank, orders in self.orders.items() if orders]
            moves += [("answer", rank) for rank, answers in self.answers.items() if answers]
            assert moves, f"nothing runs and nothing can: {self.flow.waiting()}"
            now = [move for move in moves if self.dice.random() < self.speeds[move]]
            for kind, rank in now or [self.dice.choice(moves)]:
                if kind == "work":
                    self._work(rank)
                else:
                    self._take(self.answers[rank].popleft())
            self._compose_and_send()
            self.directory.assert_invariants()

    def _work(self, rank: Rank) -> None:
        answer = self.stages[rank].execute(self.orders[rank].popleft())
        self.answers[rank].extend(answer if isinstance(answer, tuple) else [answer])

    def _compose_and_send(self) -> None:
        while self.todo and self.todo[0].index - self.flow.version <= self.scenario.ahead:
            self.open.append(self.todo[0])
            self.flow.add(self.todo.popleft())
        packs: Counter[int] = Counter()
        for role, rank, order in self.flow.orders():
            self._check(role, rank, order)
            if isinstance(order, PackOrder):
                most = max(packs.values(), default=0)
                packs[rank] += 1
                assert packs[rank] >= most, "a consumer has its next pack before another has its first"
            self.sent.append((role, rank, order))
            self.orders[role, rank].append(order)
        for place, waiting in self.orders.items():
            in_flight = Counter(type(message) for message in [*waiting, *self.answers[place]])
            assert in_flight[EncodeOrder] + in_flight[UnitEncoded] <= DEPTH
            assert in_flight[PackOrder] + in_flight[PackTrained] < DEPTH + self.scenario.held

    def _check(self, role: Role, rank: int, order: Any) -> None:
        if isinstance(order, EncodeOrder):
            unit = order.unit
            assert unit.producer in (None, rank)
            assert order.keep_graph == (self.scenario.trainable and unit.id.phase is Phase.TRAIN)
            if self.scenario.trainable:
                assert order.version == self.flow.version
                assert self.flow.version >= unit.id.step - (unit.id.phase is Phase.TRAIN), "made with old parameters"
        if isinstance(order, PackOrder):
            self._check_reserve()
            assert self.flow.version >= order.step - (order.phase is Phase.TRAIN), "a pack before the update it needs"
            assert order.return_gradients == (self.scenario.trainable and order.phase is Phase.TRAIN)
            assert self.flow.begun((order.phase, order.step))
        if isinstance(order, BackwardOrder) and self.scenario.shards > 1:
            self._check_whole_slots(rank, order)
        if isinstance(order, ReduceOrder) and self.scenario.colocated:
            packs = next(step.packs for step in self.open if (step.phase, step.index) == (Phase.TRAIN, order.step))
            left = [p for p in packs if (Phase.TRAIN, order.step, p.slot, p.rank) not in self.trained]
            assert not left, "a process waits for the sums of others while it has packs to run"
        self._check_exchange(order)

    def _check_whole_slots(self, rank: int, order: BackwardOrder) -> None:
        """Producers that meet at each call return all of a slot at once, when its last pack is done."""
        slots = {(unit.phase, unit.step, unit.slot) for unit in order.units}
        packs = [p for step in self.open for p in step.packs if (step.phase, step.index, p.slot) in slots]
        done = {(phase, step, slot, p.rank) for phase, step, slot in slots for p in packs if p.slot == slot}
        assert done <= self.trained, "a gradient goes back while packs of its slot are to run"
        own = {unit.id for p in packs for unit in p.units if unit.producer == rank}
        assert own == set(order.units), "gradients of a slot go back in pieces"

    def _check_reserve(self) -> None:
        """The first pack of a frozen encoder's run finds a reserve, or producers that can do no more."""
        sent = [type(order) for _, _, order in self.sent]
        if self.scenario.exchange == "pool" and not self.scenario.trainable and PackOrder not in sent:
            packs = [pack for step in self.open for pack in step.packs]
            ready = sum(all(unit.id in self.encoded for unit in pack.units) for pack in packs)
            enough = ready >= self.scenario.prefill * self.scenario.num_consumers
            assert enough or sent.count(EncodeOrder) == len(self.encoded), "a consumer began without the reserve"

    def _check_exchange(self, order: Any) -> None:
        """What may overlap, by the answers that have come."""
        if self.scenario.exchange == "pool" or isinstance(order, ReduceOrder):
            return
        step = self.open[0]
        packs = [pack for pack in step.packs if (step.phase, step.index, pack.slot, pack.rank) not in self.trained]
        missing = [unit for pack in step.packs for unit in pack.units if unit.id not in self.encoded]
        if isinstance(order, EncodeOrder):
            assert (order.unit.id.phase, order.unit.id.step) == (step.phase, step.index), "ahead of the step that runs"
            if self.scenario.exchange == "barrier_pipeline":
                assert order.unit.id.slot <= min(pack.slot for pack in packs) + self.scenario.held, "too far ahead"
        elif self.scenario.exchange == "barrier_step":
            assert not missing, "a side works while the other one does"
            assert isinstance(order, PackOrder) or not packs, "a gradient goes back while packs run"

    def _take(self, answer: Any) -> None:
        match answer:
            case UnitEncoded():
                self.encoded.add(answer.unit)
                self.flow.encoded(answer)
            case PackTrained():
                self.trained.add((answer.phase, answer.step, answer.slot, answer.rank))
                self.flow.trained(answer)
            case UnitsReturned():
                self.flow.returned(answer)
            case ReduceOrder():
                self.reports[answer.step] += 1
        for step in list(self.open):
            key = (step.phase, step.index)
            if not self.flow.finished(key):
                continue
            if step.phase is Phase.TRAIN:
                if step.index != self.flow.version + 1 or self.reports[step.index] < len(self.reduced_ranks()):
                    continue
                for rank in self.reduced_ranks():
                    self.orders[rank].append(UpdateSent(step.index))
                self.flow.update_sent(step.index)
            skipped = self.flow.bad_rows(key).keys()
            assert skipped == {s.position for s in step.samples if s.position in self.bad}
            assert self.flow.forget(key) is step
            self.open.remove(step)


def need(unit: UnitId) -> tuple[int, bool, int, int, int]:
    return unit.step, unit.phase is Phase.EVAL, unit.slot, unit.rank, unit.number


def check(run: Run) -> None:
    """What must hold once a run has ended."""
    scenario = run.scenario
    units = [unit for step in run.steps for pack in step.packs for unit in pack.units]
    encoded = [order.unit.id for _, _, order in run.sent if isinstance(order, EncodeOrder)]
    assert Counter(encoded) == Counter(unit.id for unit in units), "each unit is encoded once"
    if not (scenario.trainable or scenario.shards > 1 or scenario.colocated):
        assert encoded == sorted(encoded, key=need), "units are sent in the order of need"
    for consumer in run.consumers:
        mine = [pack for step in run.steps for pack in step.packs if pack.rank == consumer.rank]
        assert consumer.packs == mine, "packs of a rank run in their order"
    returned = []
    for producer in run.producers:
        assert producer.encoded == sorted(producer.encoded, key=need)
        assert producer.returned == sorted(producer.returned, key=need), "backwards run in unit order"
        assert not producer.kept
        returned += producer.returned
    trained = [unit for unit in units if unit.id.phase is Phase.TRAIN]
    good = [u.id for u in trained if scenario.shards > 1 or any(s.position not in run.bad for s in u.samples)]
    assert Counter(returned) == Counter(good if scenario.trainable else [])
    for producer in run.producers:
        first = run.producers[producer.rank // scenario.shards * scenario.shards]
        assert producer.calls == first.calls, "those who encode together do the same in the same order"
    num_updates = len(scenario.sizes)
    reduces = Counter((role, rank, o.step) for role, rank, o in run.sent if isinstance(o, ReduceOrder))
    assert reduces == Counter((*rank, step) for rank in run.reduced_ranks() for step in range(1, num_updates + 1))
    assert run.directory.used_bytes() == 0, "every block was released"
    for producer in run.producers:
        left = [*run.flow.producers.frees[producer.rank], *run.directory.frees(producer.rank)]
        held = [address for address in producer.content if owner_of(address) == producer.rank]
        assert sorted(left) == sorted(held), "what the owner still holds is on its way to be freed, each block once"
        assert run.directory.room(producer.rank, [run.segments[producer.rank] - HEADER_BYTES])


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios(most_shards=1))
def test_colocated_ranks_sum_when_their_packs_are_done(scenario: Scenario) -> None:
    run = Run(replace(scenario, num_producers=scenario.num_consumers, colocated=True))
    run.run()
    check(run)


@settings(max_examples=200, deadline=None)
@given(scenario=scenarios())
def test_a_run_ends_in_order_and_within_the_pool(scenario: Scenario) -> None:
    run = Run(scenario)
    run.run()
    check(run)


def plain(**changes: Any) -> Scenario:
    """Three steps of two slots, one producer and one consumer, one unit of one sample in each pack."""
    values: dict[str, Any] = {
        "num_producers": 1,
        "shards": 1,
        "num_consumers": 1,
        "trainable": False,
        "reduced_roles": frozenset({Role.CONSUMER}),
        "sizes": [[[[[8]]], [[[8]]]]] * 3,
        "evals": frozenset(),
        "fixed_in_eval": True,
        "bad_share": 0.0,
        "ahead": 3,
        "slack": 0,
        "seed": 1,
    }
    return Scenario(**{**values, **changes})


def work_off(run: Run, role: Role) -> None:
    """Only the stages of one side work and answer, until nothing more is sent to them."""
    run._compose_and_send()
    while any(run.orders[rank] or run.answers[rank] for rank in run.stages if rank[0] is role):
        for rank in run.stages:
            if rank[0] is role and run.orders[rank]:
                run._work(rank)
            if rank[0] is role and run.answers[rank]:
                run._take(run.answers[rank].popleft())
        run._compose_and_send()


def test_a_frozen_encoder_runs_ahead_as_far_as_the_pool_goes() -> None:
    room = Run(plain(slack=100))
    work_off(room, Role.PRODUCER)
    assert len(room.producers[0].encoded) == 6, "all three steps, before any pack has run"
    tight = Run(plain())
    work_off(tight, Role.PRODUCER)
    assert len(tight.producers[0].encoded) == 2, "the segment holds two blocks"
    assert tight.directory.used_bytes() == tight.directory.capacity()
    waiting = tight.flow.waiting()
    assert waiting.startswith("unit 0 of train step 2, slot 0, rank 0 waits for room in the pool; ")
    assert "consumer 0 waits for units not yet sent to a producer; in flight: consumer 0" in waiting
    tight.run()
    check(tight)


@pytest.mark.parametrize(
    ("changes", "encoded"),
    [
        ({"prefill": 3}, 3),
        ({"prefill": 50}, 6),  # all that there is
        ({"prefill": 3, "slack": 0}, 2),  # all that the pool has room for
        ({"prefill": 3, "exchange": "barrier_pipeline"}, 1),
        ({"prefill": 3, "trainable": True}, 1),
        ({"prefill": 4, "sizes": [[[[]], [[[8]]]]] * 3}, 1),  # packs of text are ready
    ],
)
def test_the_first_pack_waits_for_a_reserve(changes: dict[str, Any], encoded: int) -> None:
    run = Run(plain(**{"slack": 100, **changes}))
    run._compose_and_send()
    while not any(isinstance(order, PackOrder) for _, _, order in run.sent):
        run._work((Role.PRODUCER, 0))
        run._take(run.answers[Role.PRODUCER, 0].popleft())
        run._compose_and_send()
    assert len(run.encoded) == encoded
    run.run()
    check(run)


def test_a_trainable_encoder_waits_for_the_update() -> None:
    run = Run(plain(trainable=True, reduced_roles=frozenset(Role) - {Role.READER}, slack=100))
    work_off(run, Role.PRODUCER)
    assert {unit.step for unit in run.producers[0].encoded} == {1}
    assert "waits for the update of step 1" in run.flow.waiting()
    run.run()
    check(run)


@pytest.mark.parametrize(("exchange", "slots"), [("pool", 8), ("barrier_pipeline", 2), ("barrier_step", 4)])
def test_how_far_an_encoder_runs_ahead_is_the_exchanges(exchange: str, slots: int) -> None:
    """Two steps of four slots, composed at once, and room for everything."""
    run = Run(plain(exchange=exchange, sizes=[[[[[8]]]] * 4] * 2, slack=1000))
    work_off(run, Role.PRODUCER)
    assert len(run.producers[0].encoded) == slots
    run.run()
    check(run)


def test_a_step_that_the_pool_cannot_hold_whole_is_refused() -> None:
    run = Run(plain(exchange="barrier_step"), segments={0: 1024})
    with pytest.raises(PlanError, match=r"keeps all features of a step: \d+ bytes for step 1, .* has 1024"):
        run.run()


def test_who_waits_for_whom_is_told() -> None:
    run = Run(plain())
    run._compose_and_send()
    assert run.flow.waiting().endswith("consumer 0 waits for units of producer 0; in flight: producer 0")


@pytest.mark.parametrize(
    ("trainable", "told"), [(False, "1 samples can be read by others, 0 may"), (True, "0 samples .* 1 may hold half")]
)
def test_the_leases_of_a_process_that_died_expire(trainable: bool, told: str) -> None:
    roles = frozenset({Role.PRODUCER, Role.CONSUMER}) if trainable else frozenset({Role.CONSUMER})
    run = Run(plain(sizes=[[[[[8]]]]], trainable=trainable, reduced_roles=roles))
    work_off(run, Role.PRODUCER)
    assert run.flow.lost(Role.PRODUCER, 0) is None, "who writes has no lease"
    left = run.flow.lost(Role.CONSUMER, 0)
    assert left is not None
    assert re.search(told, left)
    assert run.flow.lost(Role.CONSUMER, 0) is None


def test_text_only_packs_need_no_producer() -> None:
    run = Run(plain(sizes=[[[[]], [[]]]] * 2))
    work_off(run, Role.CONSUMER)
    assert [pack.slot for pack in run.consumers[0].packs] == [0, 1] * 2
    assert not run.producers[0].encoded


def test_a_slot_above_the_promise_is_what_stops_a_run() -> None:
    """The bound is needed: two units of one pack in a segment that holds one of them."""
    run = Run(plain(sizes=[[[[[8], [20]]]]]), segments={0: block_bytes(20 * 48)})
    with pytest.raises(AssertionError, match=r"nothing runs and nothing can: .* waits for room in the pool"):
        run.run()
