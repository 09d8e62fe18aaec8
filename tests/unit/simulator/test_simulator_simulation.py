"""Simulated runs against what can be worked out by hand, and laws that hold for all of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import AT_ONCE, Even, simulation

from flowtrain.allocator.predict import play
from flowtrain.errors import PlanError
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.simulator import Control, Cores, Disturbances, Simulation
from flowtrain.simulator.simulation import Shown

EVERYTHING = Shown(ranks=1000, steps=1000)


def period(run: Simulation) -> float:
    """Seconds of a step, from the last two."""
    records = run.run(10).steps
    return records[-1].end - records[-2].end


@pytest.mark.parametrize(("encode", "pack"), [(1.0, 2.0), (2.0, 1.0), (1.5, 1.5)])
def test_a_frozen_encoder_runs_at_the_rate_of_the_slowest_module(encode: float, pack: float) -> None:
    run = simulation(Even(encode=encode, pack=pack), trainable=False)
    assert period(run) == pytest.approx(4 * max(encode, pack))


def test_producers_add_up_and_consumers_share() -> None:
    run = simulation(Even(encode=2.0, pack=1.0), trainable=False, producers=3, consumers=2, packs=3)
    assert period(run) == pytest.approx(6 * 2.0 / 3)


@pytest.mark.parametrize(("encode", "pack", "back"), [(1.0, 2.0, 0.5), (2.0, 0.5, 1.0), (1.0, 1.0, 1.0)])
def test_a_trainable_encoder_takes_what_the_allocator_plays(encode: float, pack: float, back: float) -> None:
    """With lag 0 nothing of the next step begins before the update."""
    run = simulation(Even(encode=encode, backward=back, pack=pack, update=0.25))
    assert period(run) == pytest.approx(play([encode] * 4, [pack] * 4, [back] * 4, 1, 1) + 0.25)


def test_barrier_step_takes_the_sum_of_both_sides() -> None:
    timing = Even(encode=1.0, backward=0.5, pack=2.0, reduce=0.1, update=0.2)
    assert period(simulation(timing, exchange="barrier_step")) == pytest.approx(4 * 3.5 + 0.1 + 0.2)


def test_barrier_pipeline_encodes_one_slot_ahead_and_waits_for_the_step() -> None:
    run = simulation(Even(encode=1.0, pack=2.0), trainable=False, exchange="barrier_pipeline")
    assert period(run) == pytest.approx(1.0 + 4 * 2.0)


def test_colocated_ranks_take_turns() -> None:
    timing = Even(encode=1.0, backward=0.5, pack=2.0, update=0.25)
    for ranks in (1, 3):
        run = simulation(timing, producers=ranks, consumers=ranks, colocated=True)
        assert period(run) == pytest.approx(4 * 3.5 + 2 * 0.25)


def test_a_pipeline_fills_once_a_step() -> None:
    run = simulation(Even(encode=0.1, pack=1.0, fill=3.0), trainable=False)
    assert period(run) == pytest.approx(4 * 1.0 + 3.0)


def test_in_lock_step_the_slowest_of_a_slot_decides() -> None:
    slow = Disturbances(straggler_share=0.25, slowdown=2.0)
    timing = Even(encode=0.01, pack=1.0)
    apart = simulation(timing, trainable=False, consumers=4, disturbances=slow)
    together = simulation(timing, trainable=False, consumers=4, consumer_group=4, disturbances=slow)
    both = [run.run(8) for run in (apart, together)]
    assert both[0].seconds == pytest.approx(both[1].seconds, rel=1e-3)
    lock_step, reduce_wait = both[1].figures()["lock_step_percent"], both[0].figures()["reduce_wait_percent"]
    assert both[0].figures()["lock_step_percent"] == 0.0
    assert reduce_wait == pytest.approx(100 * 0.75 / 2, rel=0.02)
    assert both[1].figures()["consumer_busy_percent"] > 99
    assert lock_step == pytest.approx(0.0)


def test_a_small_pool_holds_producers_up_and_a_large_one_lets_them_run_ahead() -> None:
    timing = Even(encode=1.0, pack=2.0)
    small, large = (simulation(timing, trainable=False, blocks=blocks).run(10) for blocks in (2, 1000))
    assert small.figures()["stall_percent"] == pytest.approx(50.0, abs=5.0)
    assert large.figures()["stall_percent"] < 1.0
    assert small.figures()["starvation_percent"] < 1.0


def test_a_reserve_is_there_before_the_first_pack() -> None:
    timing = Even(encode=1.0, pack=1.0)
    plain, filled = (simulation(timing, trainable=False, prefill=prefill).run(4) for prefill in (0, 3))
    assert [step.end for step in plain.steps] == pytest.approx([1 + 4 * n for n in (1, 2, 3, 4)])
    assert [step.end for step in filled.steps] == pytest.approx([3 + 4 * n for n in (1, 2, 3, 4)])


def test_a_pool_without_room_for_a_step_is_refused_under_barrier_step() -> None:
    with pytest.raises(PlanError, match="barrier_step keeps all features of a step"):
        simulation(Even(), exchange="barrier_step", blocks=3).run(2)


def test_a_pool_without_room_for_a_unit_is_told() -> None:
    with pytest.raises(PlanError, match=r"nothing runs and nothing can after 0 simulated seconds .*room in the pool"):
        simulation(Even(), blocks=0.5, packs=1).run(2)


def test_messages_and_the_controller_take_time() -> None:
    timing = Even(encode=0.0, pack=1.0)
    control = Control(latency_seconds=0.1, answer_seconds=0.05)
    run = simulation(timing, trainable=False, packs=1, control=control)
    # A step of one pack: its order, the reduction's, and the update's way, which the next pack follows at once.
    assert period(run) >= 1.0 + 2 * 0.1 + 2 * 0.05
    found = run.outcome()
    assert found.control_seconds == pytest.approx(0.05 * found.answers)


def test_a_busy_controller_bounds_the_rate() -> None:
    control = Control(latency_seconds=0.0, answer_seconds=0.5)
    run = simulation(Even(encode=0.01, pack=0.01), trainable=False, consumers=4, packs=4, control=control)
    outcome = run.run(6)
    assert outcome.seconds == pytest.approx(0.5 * outcome.answers, rel=0.1)


def test_a_checkpoint_stops_every_rank_that_trains() -> None:
    timing = Even(encode=0.1, pack=1.0)
    saving = simulation(timing, trainable=False, save_every=2, save_seconds=3.0).run(10)
    plain = simulation(timing, trainable=False).run(10)
    assert saving.seconds - plain.seconds == pytest.approx(4 * 3.0)  # the last one follows the last step
    assert saving.saved == 5


def test_jitter_of_one_rank_changes_no_mean_and_of_many_costs_time() -> None:
    jitter = Disturbances(jitter=0.3, seed=1)
    timing = Even(encode=0.001, pack=1.0)
    alone = simulation(timing, trainable=False, packs=40, num_steps=10, disturbances=jitter).run(10)
    many = simulation(timing, trainable=False, consumers=16, num_steps=10, disturbances=jitter).run(10)
    assert alone.seconds == pytest.approx(400, rel=0.06)
    assert many.seconds > 1.15 * 40


def test_failures_cost_what_is_lost_and_the_restart() -> None:
    timing = Even(encode=0.1, pack=1.0)
    failing = Disturbances(device_hours=2 * 60 / 3600, restart_seconds=10.0, seed=3)  # two devices: one a minute
    run = simulation(timing, num_steps=60, trainable=False, save_every=5, disturbances=failing)
    outcome = run.run(60)
    plain = simulation(timing, num_steps=60, trainable=False).run(60)
    assert outcome.failures >= 3
    # What was lost is played again; each start encodes its first pack before anything trains.
    again = outcome.seconds - plain.seconds
    assert again == pytest.approx(outcome.lost_seconds, abs=0.2 * (outcome.failures + 1))
    assert [step.step for step in outcome.steps] == list(range(1, 61))
    assert all(a.end < b.end for a, b in zip(outcome.steps, outcome.steps[1:], strict=False))


def test_more_ranks_than_cores_take_turns_on_them() -> None:
    timing = Even(encode=2.0, pack=2.0)
    apart, shared = (simulation(timing, trainable=False, producers=2, consumers=2, cores=c) for c in (None, Cores(2)))
    assert apart.run(10).seconds == pytest.approx(2.0 + 10 * 4 * 2.0)
    # Two cores work off 16 s times 10 for either side; both are busy from the beginning to the end.
    assert shared.run(10).seconds == pytest.approx(2 * 10 * 16.0 / 2)


def test_busy_cores_are_slower_only_while_both_are_busy() -> None:
    """With a trainable encoder a step's only unit and pack run one after the other, with a frozen one both at once."""
    timing = Even(encode=1.0, pack=1.0)
    cores = Cores(2, together=0.5)
    assert simulation(timing, packs=1, cores=cores).run(10).seconds == pytest.approx(10 * (1.0 + 1.0))
    assert simulation(timing, packs=1, trainable=False, cores=cores).run(10).seconds == pytest.approx(
        1.0 + 9 * 2.0 + 1.0
    )
    assert [Cores(4, 0.7).speed(ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([1.0, 0.9, 0.7, 0.35])


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
@pytest.mark.parametrize("group", [1, 2])
def test_as_many_cores_as_ranks_are_devices_of_their_own(exchange: str, group: int) -> None:
    timing = Even(encode=0.7, backward=0.4, pack=1.1, reduce=0.2, update=0.1)
    both = [
        simulation(
            timing,
            producers=3,
            consumers=2,
            consumer_group=group,
            exchange=exchange,
            control=Control(),
            save_every=4,
            save_seconds=0.5,
            disturbances=Disturbances(jitter=0.2, seed=2),
            cores=cores,
        ).run(10)
        for cores in (None, Cores(5))
    ]
    for ours, theirs in zip(both[1].steps, both[0].steps, strict=True):
        found, expected = (
            {name: value for name, value in asdict(record).items() if isinstance(value, float)}
            for record in (ours, theirs)
        )
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@st.composite
def runs(draw: st.DrawFn) -> Simulation:
    ranks = draw(st.integers(1, 3))
    colocated = draw(st.booleans())
    timing = Even(*(draw(st.floats(0.01, 2.0)) for _ in range(3)), *(draw(st.floats(0.0, 0.5)) for _ in range(3)))
    disturbances = Disturbances(
        jitter=draw(st.sampled_from([0.0, 0.3])),
        straggler_share=draw(st.sampled_from([0.0, 0.5])),
        slowdown=2.0,
        device_hours=draw(st.sampled_from([None, 0.1])),
        restart_seconds=1.0,
        seed=draw(st.integers(0, 1000)),
    )
    return simulation(
        timing,
        num_steps=5,
        packs=draw(st.integers(1, 4)),
        producers=ranks if colocated else draw(st.integers(1, 3)),
        consumers=ranks,
        trainable=draw(st.booleans()),
        exchange=draw(st.sampled_from(sorted(EXCHANGES))),
        blocks=draw(st.integers(16, 40)),
        colocated=colocated,
        consumer_group=draw(st.sampled_from([1, ranks])),
        save_every=draw(st.sampled_from([None, 2])),
        save_seconds=0.5,
        control=draw(st.sampled_from([AT_ONCE, Control()])),
        disturbances=disturbances,
        shown=EVERYTHING,
    )


@settings(deadline=None, max_examples=40)
@given(runs())
def test_every_pack_is_trained_once_and_time_is_conserved(run: Simulation) -> None:
    outcome = run.run(5)
    system = run.system
    assert [record.step for record in outcome.steps] == [1, 2, 3, 4, 5]
    assert sum(record.rows for record in outcome.steps) == len(outcome.steps) * outcome.steps[0].rows
    by_device = defaultdict(list)
    kinds: Counter[str] = Counter()
    for span in outcome.spans:
        by_device[system.device(span.role, span.rank)].append((span.start, span.end))
        kinds[span.kind] += 1
    if not outcome.failures:
        assert kinds["train"] == sum(record.rows for record in outcome.steps) == kinds["encode"]
        for spans in by_device.values():
            spans.sort()
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
            assert sum(end - start for start, end in spans) <= spans[-1][1] + 1e-9
    for record in outcome.steps:
        assert math.isfinite(record.end)
        assert min(record.starvation, record.stall, record.lock_step) >= 0
        assert record.imbalance >= 1.0 - 1e-12


def test_the_same_arguments_give_the_same_outcome() -> None:
    disturbances = Disturbances(jitter=0.2, device_hours=0.05, restart_seconds=1.0, seed=5)
    both = [
        simulation(Even(pack=1.3), consumers=2, producers=2, save_every=3, disturbances=disturbances).run(10)
        for _ in range(2)
    ]
    assert both[0].to_dict() == both[1].to_dict()
