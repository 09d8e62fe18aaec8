"""Curves between and beyond what was measured, the file and its faults, and the play of a step against a clock."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from profiles import MADE

from flowtrain.allocator.predict import Predictor, Setup, play, predict
from flowtrain.allocator.profile import (
    Measured,
    PackWork,
    Profile,
    Timing,
    dump_profile,
    on_curve,
    over_threads,
    read_profile,
    timing,
)
from flowtrain.errors import ConfigError
from flowtrain.types import Role


def curve(*points: tuple[float, float]) -> tuple[Timing, ...]:
    return tuple(Timing(work=work, seconds=seconds, spread=0.1, num=3) for work, seconds in points)


def measured(role: Role, threads: int, pace: float, together: bool = False, colocated: bool = False) -> Measured:
    return Measured(
        role=role.value,
        device="cpu",
        threads=threads,
        together=together,
        colocated=colocated,
        forward=curve((1.0, pace), (2.0, 2 * pace)),
        backward=curve((1.0, pace), (2.0, 2 * pace)) if role is Role.PRODUCER else (),
        update_seconds=0.5,
    )


def make_profile(*stages: Measured, trainable: bool = True) -> Profile:
    packs = tuple(PackWork(rows=4, encode=1.0, train=3.0) for _ in range(4))
    return Profile(
        made=MADE,
        trainable_encoder=trainable,
        consumers=1,
        read_seconds=0.01,
        call_seconds=0.0,
        overhead_seconds=0.2,
        stages=stages,
        steps=(packs,),
    )


APART = (measured(Role.PRODUCER, 1, 1.0), measured(Role.CONSUMER, 1, 1.0))


@given(
    st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(1e-3, 10)), min_size=1, max_size=5),
    st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=6),
)
def test_a_curve_never_falls_and_is_never_negative(points: list[tuple[float, float]], works: list[float]) -> None:
    drawn = curve(*points)
    seconds = [on_curve(drawn, work) for work in sorted(works)]
    assert all(value >= 0 for value in seconds)
    assert seconds == pytest.approx(sorted(seconds), rel=1e-9)


def test_a_curve_goes_through_its_points_and_straight_beyond() -> None:
    drawn = curve((2.0, 3.0), (4.0, 5.0), (6.0, 9.0))
    assert [on_curve(drawn, work) for work in (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)] == [3.0, 4.0, 5.0, 7.0, 9.0, 13.0]
    assert on_curve(drawn, 0.0) == pytest.approx(1.0)
    assert on_curve(curve((2.0, 3.0)), 4.0) == 6.0


@given(st.integers(1, 64))
def test_threads_between_two_measured_lie_between_them(threads: int) -> None:
    seconds = over_threads([(1, 8.0), (4, 3.0)], threads)
    assert 3.0 <= seconds <= 8.0
    assert over_threads([(2, 8.0)], 1) == 16.0


def test_a_timing_has_the_means_of_its_orders() -> None:
    point = timing([(1.0, 2.0), (3.0, 6.0)])
    assert (point.work, point.seconds, point.spread, point.num) == (2.0, 4.0, 0.0, 2)


@given(
    st.lists(st.tuples(*[st.floats(0.01, 5)] * 3), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_step_is_no_shorter_than_its_parts(
    packs: list[tuple[float, float, float]], producers: int, consumers: int
) -> None:
    encode, train, back = (list(column) for column in zip(*packs, strict=True))
    seconds = play(encode, train, back, producers, consumers)
    assert seconds >= (sum(encode) + sum(back)) / producers - 1e-9
    assert seconds >= sum(train) / consumers + min(encode) + back[-1] * (consumers == 1) - 1e-9
    assert seconds <= sum(encode) + sum(train) + sum(back) + 1e-9


def test_one_of_each_fills_and_drains() -> None:
    found = predict(make_profile(*APART), Setup(False, 1, 1, 1, 1, cores=2))
    assert found.step_seconds == pytest.approx(1 + 4 * 3 + 1 + 0.5)
    assert found.samples_per_second == pytest.approx(16 / found.step_seconds)


def test_a_frozen_encoder_runs_ahead() -> None:
    found = predict(make_profile(*APART, trainable=False), Setup(False, 1, 1, 1, 1, cores=2))
    assert found.step_seconds == pytest.approx(4 * 3 + 0.5)


def test_one_process_does_everything_in_turn() -> None:
    both = tuple(measured(role, 2, 0.75, colocated=True) for role in (Role.PRODUCER, Role.CONSUMER))
    found = predict(make_profile(*APART, *both), Setup(True, 1, 2, 1, 2, cores=2))
    assert found.step_seconds == pytest.approx(4 * 0.75 * (1 + 1 + 3) + 2 * 0.5 + 0.2 + 16 * 0.01)


def test_sides_that_slow_each_other_down_do_so_for_the_time_both_are_busy() -> None:
    slower = (measured(Role.PRODUCER, 1, 1.5, together=True), measured(Role.CONSUMER, 1, 1.5, together=True))
    alone, both = (
        predict(make_profile(*stages), Setup(False, 1, 1, 1, 1, cores=2)) for stages in (APART, APART + slower)
    )
    assert alone.step_seconds < both.step_seconds < 1.5 * alone.step_seconds


def test_more_processes_than_cores_are_no_faster_than_the_cores() -> None:
    found = predict(make_profile(*APART), Setup(False, 4, 1, 4, 1, cores=2))
    assert found.step_seconds >= (4 * 5.0 + 0.16) / 2 - 1e-9


def test_one_predictor_predicts_every_setup_as_a_new_one_does() -> None:
    stages = [
        measured(role, threads, 1.0 / threads + 0.1 * together, together)
        for role in (Role.PRODUCER, Role.CONSUMER)
        for threads in (1, 2, 4)
        for together in (False, True)
    ]
    for trainable in (False, True):
        profile = make_profile(*stages, trainable=trainable)
        predictor = Predictor(profile)
        numbers = itertools.product((False, True), (1, 2), (1, 3), (1, 2), (2, 4))
        setups = [Setup(*number, cores=8) for number in numbers]
        assert [predictor.predict(setup) for setup in setups] == [predict(profile, setup) for setup in setups]


def test_a_file_gives_the_same_profile_back(tmp_path: Path) -> None:
    profile = make_profile(*APART)
    path = tmp_path / "profile.yaml"
    path.write_text(dump_profile(profile))
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 99}, "format is 99"),
        ({"speed": 1}, "speed: "),
        ({"read_seconds": -1.0}, "read_seconds: "),
        ({"stages": []}, "has no producer"),
        ({"steps": []}, "steps: "),
    ],
)
def test_a_fault_names_file_and_key(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(make_profile(*APART).model_dump(mode="json") | change))
    with pytest.raises(ConfigError, match=r"profile\.yaml") as caught:
        read_profile(path)
    assert told in str(caught.value)
    assert "flowtrain profile" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="flowtrain profile"):
        read_profile(path)
    with pytest.raises(ConfigError, match="no such profile"):
        read_profile(tmp_path / "none.yaml")
