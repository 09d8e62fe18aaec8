"""Producers come and go between two steps: whatever runs, every unit is encoded once, by one that was there (C1)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from flow_scenarios import Scenario, payload_of, scenarios, segments_for, steps_of, windows
from flow_stages import Producer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_flow import Run, plain

from flowtrain.messages import EncodeOrder, ReduceOrder
from flowtrain.pool.address import LINE_BYTES
from flowtrain.pool.block import block_bytes
from flowtrain.pool.space import OwnerSpace
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.types import Phase, Role, Step


def whole_slots(scenario: Scenario) -> dict[int, int]:
    """Segments that hold the slots that a consumer has together whoever encodes them, as composition promises, and
    their largest block; a whole step where the exchange wants that."""
    if EXCHANGES[scenario.exchange].whole_steps:
        return segments_for(scenario, steps_of(scenario))
    together = [
        [unit for slot in slots for pack in slot for unit in pack.units]
        for step in steps_of(scenario)
        for slots in windows(step.slots, scenario.held)
    ]
    blocks = [block_bytes(payload_of(s)) for units in together for unit in units for s in unit.samples]
    size = max((sum(unit.bytes for unit in units) for units in together), default=0) + max(blocks, default=LINE_BYTES)
    return dict.fromkeys(range(scenario.num_producers), size + scenario.slack * LINE_BYTES)


class ChangingRun(Run):
    """From step `at` on there are `after` producers; with `live` the step is the first unbegun one at a random time."""

    def __init__(self, scenario: Scenario, after: int, at: int, live: bool) -> None:
        super().__init__(scenario, whole_slots(scenario))
        self.before, self.after, self.at = scenario.num_producers, after, at
        self.held = self.changed = False
        self.live = live and not scenario.trainable
        self.numbers: dict[int, int] = {}
        if not self.live:
            self.steps = [self._given(step) if step.index >= at else step for step in self.steps]
            self.todo = deque(self.steps)
            self.flow.hold(at)
            self.held = True

    def _given(self, step: Step) -> Step:
        """The step, its units given to the producers that there will be."""
        slots = tuple(
            tuple(
                pack._replace(
                    units=tuple(
                        unit._replace(producer=None if unit.producer is None else unit.id.number % self.after)
                        for unit in pack.units
                    ),
                )
                for pack in slot
            )
            for slot in step.slots
        )
        return replace(step, slots=slots)

    def _compose_and_send(self) -> None:
        if self.live and not self.held and self.dice.random() < 0.1:
            self.at, self.held = self.flow.first_unbegun, True
            self.flow.hold(self.at)
        super()._compose_and_send()
        busy = any(map(len, (*self.orders.values(), *self.answers.values())))
        if self.held and not self.changed and self.flow.drained and self.open and not busy:
            assert all(step.index >= self.at for step in self.open)
            self._change()
            super()._compose_and_send()

    def _change(self) -> None:
        for rank in range(self.before, self.after):
            size = self.segments[0]
            stage = Producer(
                rank, OwnerSpace(rank, size), self.producers[0].content, self.bad, version=self.flow.version
            )
            place = (Role.PRODUCER, rank)
            self.producers.append(stage)
            self.stages[place], self.orders[place], self.answers[place] = stage, deque(), deque()
            self.speeds |= {("work", place): 0.3, ("answer", place): 0.3}
            self.directory.add(rank, size)
        for rank in range(self.after, self.before):
            for of_place in (self.stages, self.orders, self.answers):
                del of_place[Role.PRODUCER, rank]
            self.directory.remove(rank)
        self.flow.resize(range(self.after))
        self.changed = True

    def _check_reserve(self) -> None:
        """Where a step is held, producers have nothing to do until the packs before it have run."""
        if not self.held:
            super()._check_reserve()

    def _check(self, role: Role, rank: int, order: Any) -> None:
        super()._check(role, rank, order)
        step = order.unit.id.step if isinstance(order, EncodeOrder) else getattr(order, "step", 0)
        if role is Role.PRODUCER and step:
            assert rank < (self.after if self.changed else self.before)
            assert not self.held or (step >= self.at) == self.changed, "a held step begins, or one before it is late"


@settings(max_examples=100, deadline=None)
@given(scenarios(most_shards=1), st.integers(1, 4), st.data(), st.booleans())
def test_a_change_loses_and_repeats_nothing(scenario: Scenario, after: int, data: st.DataObject, live: bool) -> None:
    num_steps = len(scenario.sizes)
    run = ChangingRun(scenario, after, data.draw(st.integers(1, num_steps)), live)
    run.run()
    units = [unit for step in run.steps for pack in step.packs for unit in pack.units]
    encoded = [order.unit.id for _, _, order in run.sent if isinstance(order, EncodeOrder)]
    assert Counter(encoded) == Counter(unit.id for unit in units)
    for consumer in run.consumers:
        mine = [pack for step in run.steps for pack in step.packs if pack.rank == consumer.rank]
        assert consumer.packs == mine, "packs of a rank run in their order"
    returned = Counter(unit for producer in run.producers for unit in producer.returned)
    good = [u.id for u in units if u.id.phase is Phase.TRAIN and any(s.position not in run.bad for s in u.samples)]
    assert returned == Counter(good if scenario.trainable else [])
    reduces = Counter((order.step, role) for role, _, order in run.sent if isinstance(order, ReduceOrder))
    if Role.PRODUCER in scenario.reduced_roles:
        for step in range(1, num_steps + 1):
            assert reduces[step, Role.PRODUCER] == (after if run.changed and step >= run.at else run.before)
    assert run.directory.used_bytes() == 0
    run.directory.assert_invariants()
    assert run.live or run.changed


def test_a_step_that_has_begun_cannot_be_held() -> None:
    run = Run(plain())
    run._compose_and_send()
    with pytest.raises(AssertionError, match="is to be held"):
        run.flow.hold(1)


def test_producers_do_not_change_under_work() -> None:
    run = Run(plain())
    run.flow.hold(2)
    run._compose_and_send()
    assert not run.flow.drained
    with pytest.raises(AssertionError, match="work is under way"):
        run.flow.resize([0, 1])


def test_an_owner_that_holds_something_does_not_leave() -> None:
    run = Run(plain())
    run._compose_and_send()
    with pytest.raises(AssertionError, match="bytes in use"):
        run.directory.remove(0)
