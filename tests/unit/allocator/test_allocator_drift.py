"""Noise alone proposes nothing, a turn of the data is noticed within its window, a proposal is the best there is."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.drift import Drift, Expected, Proposal, Rule, StepMeasured

RULE = Rule(max_producers=4, num_consumers=1, cores=None)


def step(index: int, produced: float, consumed: float, noise: float = 1.0, number: int = 1) -> StepMeasured:
    """Of `number` producers and one consumer, in proportion to work; `noise` is on the producers' seconds."""
    produced *= noise
    seconds = max(produced / number, consumed)
    waits = seconds - consumed, seconds - produced / number
    return StepMeasured(index, produced, consumed, *waits, produced / noise, consumed)


def turning(
    seed: int, sigma: float, before: float, after: float, turn: int = 30, num: int = 60, number: int = 1
) -> list[StepMeasured]:
    draw = random.Random(seed)
    return [
        step(index, before if index <= turn else after, 1.0, draw.lognormvariate(0.0, sigma), number)
        for index in range(1, num + 1)
    ]


def proposals(drift: Drift, steps: Iterable[StepMeasured]) -> list[tuple[int, Proposal]]:
    """The step and content of every proposal that these steps lead to."""
    verdicts = ((measured.step, drift.add(measured).proposal) for measured in steps)
    return [(step, proposal) for step, proposal in verdicts if proposal is not None]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 3.0), st.floats(0.0, 0.08))
def test_noise_alone_proposes_nothing(seed: int, ratio: float, sigma: float) -> None:
    assert not proposals(Drift(RULE, 1), turning(seed, sigma, ratio, ratio))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(1.5, 6.0), st.floats(0.0, 0.15))
def test_a_turn_is_noticed_within_twenty_steps(seed: int, factor: float, sigma: float) -> None:
    found = proposals(Drift(RULE, 1), turning(seed, sigma, 0.9, 0.9 * factor))
    assert found
    at, proposal = found[0]
    assert 30 < at <= 50
    assert proposal.producers > 1
    assert proposal.gain_percent >= RULE.min_gain_percent


def test_the_noise_of_an_idle_side_is_no_drift() -> None:
    draw = random.Random(0)
    steps = [step(index, draw.choice((0.0, 0.001, 0.09)), 1.0) for index in range(1, 60)]
    drift = Drift(RULE, 1)
    assert not proposals(drift, steps[:-1])
    assert drift.add(steps[-1]).drift_percent == 0.0


def test_one_slow_step_is_no_drift() -> None:
    steps = turning(0, 0.0, 1.0, 1.0)
    steps[40] = step(41, 20.0, 1.0)
    assert not proposals(Drift(RULE, 1), steps)


def test_a_profile_is_expected_from_the_first_window_on() -> None:
    drift = Drift(RULE, 1, Expected(seconds_ratio=0.5, work_ratio=0.5))
    found = proposals(drift, turning(0, 0.01, 2.0, 2.0))
    assert found
    assert found[0][0] <= RULE.warmup + RULE.window + RULE.patience
    assert found[0][1].producers == 2


def test_fewer_are_proposed_when_nothing_is_lost() -> None:
    found = proposals(Drift(RULE, 3), turning(0, 0.01, 2.9, 0.5, number=3))
    assert [proposal.producers for _, proposal in found] == [1]


def test_the_same_is_proposed_once_and_anew_after_a_change() -> None:
    drift = Drift(RULE, 1)
    found = proposals(drift, turning(0, 0.01, 0.9, 3.0, num=80))
    assert [proposal.producers for _, proposal in found] == [3]
    drift.changed(3)
    assert not proposals(drift, [step(index, 3.0, 1.0, number=3) for index in range(81, 110)])
    back = proposals(drift, [step(index, 0.9, 1.0, number=3) for index in range(110, 140)])
    assert [proposal.producers for _, proposal in back] == [1]


def test_no_number_is_beyond_the_cores() -> None:
    drift = Drift(Rule(max_producers=8, num_consumers=1, cores=2), 1)
    found = proposals(drift, turning(0, 0.0, 0.9, 4.0))
    assert [proposal.producers for _, proposal in found] == [2]
    assert found[0][1].gain_percent == pytest.approx(100 * (4.0 / 2.5 - 1))


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9)
)
def test_a_proposal_is_the_best_number_there_is(
    produced: float, consumed: float, ends: float, now: int, consumers: int, most: int
) -> None:
    most = max(most, now)
    far = 0.0 if produced * consumers > consumed * now else 1e3
    drift = Drift(Rule(most, consumers, None, threshold_percent=1e-6), now, Expected(far, far))
    seconds = {number: max(produced / number, consumed / consumers + ends) for number in range(1, most + 1)}
    waits = seconds[now] - consumed / consumers, seconds[now] - produced / now
    steps = [StepMeasured(i, produced, consumed, *waits, produced, consumed, ends) for i in range(1, 30)]
    found = proposals(drift, steps)
    for _, proposal in found:
        assert proposal.producers != now
        assert seconds[proposal.producers] <= min(seconds.values()) * (1 + RULE.min_gain_percent / 100) + 1e-9
    if not found:
        assert seconds[now] <= min(seconds.values()) * (1 + RULE.min_gain_percent / 100) ** 2


def test_a_run_without_work_on_a_side_drifts_nowhere() -> None:
    steps = [StepMeasured(i, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for i in range(1, 40)]
    assert not proposals(Drift(RULE, 1), steps)


def test_a_gain_that_no_wait_bears_out_is_not_proposed() -> None:
    drift = Drift(RULE, 1, Expected(0.5, 0.5))
    assert not proposals(drift, [StepMeasured(i, 3.0, 1.0, 0.0, 0.0, 3.0, 1.0, ends=0.5) for i in range(1, 30)])
    drift = Drift(RULE, 3, Expected(5.0, 5.0))
    assert not proposals(drift, [StepMeasured(i, 0.9, 1.0, 0.0, 0.0, 0.9, 1.0) for i in range(1, 30)])
