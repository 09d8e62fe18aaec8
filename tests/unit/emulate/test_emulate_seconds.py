"""One device at a time or a whole step: the same seconds; meetings of devices."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from flowtrain.emulate.case import Variant
from flowtrain.emulate.meeting import Meeting, enter, pause_until
from flowtrain.errors import PeerError


def test_a_device_works_as_long_as_the_model_says(make: Callable[..., Any]) -> None:
    made = make(Variant.of_mode("flow"), frozen=False, time_scale=2.0)
    seconds = made.emulation.seconds()
    step = next(made.modelled.steps())
    whole = seconds.of(step)
    for pack in step.packs:
        assert seconds.pack(1, pack) == pytest.approx(whole.packs[pack.slot][pack.rank])
        for unit in pack.units:
            assert seconds.encode(unit) == pytest.approx(whole.encode[unit.id])
            assert seconds.backward(unit) == pytest.approx(whole.backward[unit.id])
    assert min(whole.encode.values()) > 0 < min(whole.backward.values())


def test_jitter_has_the_spread_and_leaves_the_mean(make: Callable[..., Any]) -> None:
    made = make(Variant.of_mode("flow"), jitter=0.1)
    seconds = made.emulation.seconds()
    factors = [
        disturbed / plain
        for step in islice(made.modelled.steps(), 40)
        for disturbed, plain in zip(
            seconds.of(step).encode.values(), seconds.undisturbed().of(step).encode.values(), strict=True
        )
    ]
    assert statistics.stdev(factors) == pytest.approx(0.1, rel=0.25)
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.04)
    step = next(made.modelled.steps())
    assert seconds.of(step) == made.emulation.seconds().of(step)


def test_a_pipeline_is_filled_in_front_of_the_first_pack(make: Callable[..., Any]) -> None:
    made = make(Variant.of_mode("flow"))
    backbone = made.emulation.backbone
    deep = replace(backbone, candidate=replace(backbone.candidate, pp=4, vpp=2))
    choices = tuple(deep if choice is backbone else choice for choice in made.emulation.choices)
    seconds = replace(made.emulation, choices=choices).seconds()
    step = next(made.modelled.steps())
    whole = seconds.of(step)
    (first, *_), (second, *_) = step.slots[:2]
    assert whole.fill[0] == pytest.approx(1.5 * whole.packs[0][0])
    assert seconds.pack(1, first) == pytest.approx(whole.packs[0][0] + whole.fill[0])
    assert seconds.pack(1, second) == pytest.approx(whole.packs[1][0])


def test_a_meeting_ends_for_all_with_the_slowest() -> None:
    meeting, ends = Meeting(3), {}

    def come(rank: int, ready: float, seconds: float) -> None:
        ends[rank] = meeting.end_of(1, ready, seconds, 5.0)

    threads = [threading.Thread(target=come, args=of) for of in ((0, 10.0, 1.0), (1, 12.0, 0.5), (2, 11.0, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == {0: 14.0, 1: 14.0, 2: 14.0}


def test_who_does_not_come_is_told() -> None:
    with pytest.raises(PeerError, match=r"1 of 2 devices came within 0\.01 s to work 7"):
        Meeting(2).end_of(7, 0.0, 0.0, 0.01)


def test_a_rank_that_enters_again_begins_another_meeting() -> None:
    first = enter("again", 2, 0)
    assert enter("again", 2, 1) is first
    second = enter("again", 2, 0)
    assert second is not first
    assert enter("again", 2, 1) is second


def test_a_pause_ends_in_time() -> None:
    start = time.perf_counter()
    pause_until(start - 1)
    assert time.perf_counter() - start < 0.01
    pause_until(start + 0.02)
    assert time.perf_counter() >= start + 0.02
