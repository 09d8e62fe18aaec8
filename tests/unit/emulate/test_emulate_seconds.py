"""One device at a time or a whole step: the same seconds; meetings of devices."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from flowtrain.emulate.case import Variant
from flowtrain.emulate.meeting import Meeting, enter, make_boards, pause_until
from flowtrain.errors import PeerError
from flowtrain.plan import Layout
from flowtrain.types import Role


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


@pytest.fixture
def enter_all(tmp_path: Path) -> list[Meeting]:
    """Two groups of two data-parallel ranks of two peers each: what they do goes through a file."""
    layout = Layout(dp_replicate=2, dp_shard=2, pp=2)
    make_boards(tmp_path, {Role.CONSUMER: layout})
    return [enter(tmp_path, Role.CONSUMER, layout, rank) for rank in range(layout.world_size)]


def test_a_meeting_ends_for_all_of_a_group_with_the_slowest(enter_all: list[Meeting]) -> None:
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    begin = time.perf_counter()
    late = {0: 0.0, 1: 0.02, 4: 0.01, 5: 0.0, 2: 0.0, 3: 0.0, 6: 0.0, 7: 0.03}
    ends: dict[int, list[float]] = {rank: [] for rank in late}

    def come(rank: int) -> None:
        for number in range(1, 6):
            time.sleep(late[rank])
            ends[rank].append(enter_all[rank].end_of(number, begin + number + late[rank], 0.5 + rank - begin - 9, 5.0))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in late]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in (first, second):
        expected = [
            pytest.approx(number + max(late[rank] for rank in group) + 0.5 + max(group) - 9) for number in range(1, 6)
        ]
        assert [ends[rank] for rank in group] == [expected] * 4


def test_processes_meet(tmp_path: Path) -> None:
    layout, start = Layout(tp=2), time.perf_counter()
    make_boards(tmp_path, {Role.PRODUCER: layout})
    other = f"""
from pathlib import Path
from flowtrain.emulate.meeting import enter
from flowtrain.plan import Layout
from flowtrain.types import Role
print(enter(Path({str(tmp_path)!r}), Role.PRODUCER, Layout(tp=2), 1).end_of(1, {start + 0.25}, 0.5, 30.0))
"""
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE, text=True) as process:
        end = enter(tmp_path, Role.PRODUCER, layout, 0).end_of(1, start, 0.75, 30.0)
        assert float(process.communicate(timeout=60)[0]) == end == start + 1.0


def test_who_does_not_come_is_told(enter_all: list[Meeting]) -> None:
    with pytest.raises(PeerError, match=r"1 of 4 devices came within 0\.01 s to work 7"):
        enter_all[0].end_of(7, 0.0, 0.0, 0.01)


def test_a_new_run_begins_another_meeting(enter_all: list[Meeting], tmp_path: Path) -> None:
    enter_all[0].board[:, 1, 0] = 1.0
    layout = Layout(dp_replicate=2, dp_shard=2, pp=2)
    make_boards(tmp_path, {Role.CONSUMER: layout})
    assert not enter(tmp_path, Role.CONSUMER, layout, 0).board.any()
    assert enter_all[1].board[:, 1, 0].all()


def test_a_rank_of_its_own_meets_nobody(tmp_path: Path) -> None:
    alone = enter(tmp_path, Role.PRODUCER, Layout(dp_replicate=4), 3)
    assert alone.end_of(1, 2.0, 3.0, 0.0) == 5.0


def test_a_pause_ends_in_time() -> None:
    start = time.perf_counter()
    pause_until(start - 1)
    assert time.perf_counter() - start < 0.01
    pause_until(start + 0.02)
    assert time.perf_counter() >= start + 0.02
