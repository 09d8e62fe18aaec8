"""Schedules of the modes, by hand: the costs of a step in, its seconds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowtrain.cli.bench_schedule import scheduled_seconds
from flowtrain.telemetry.timeline import Timeline, read_timeline
from flowtrain.telemetry.trace import CONTROLLER, Trace

MS = 1_000_000

Order = tuple[str, str, tuple[int, ...], int, int]
"""Track, method, slots, first and last millisecond."""

END = 1000
FROZEN: list[Order] = [
    ("producer-0", "encode", (0,), 0, 20),
    ("producer-0", "encode", (1,), 20, 50),
    ("producer-0", "encode", (2,), 50, 60),
    ("consumer-0", "update", (), 0, 5),
    ("consumer-0", "train", (0,), 20, 60),
    ("consumer-0", "train", (1,), 60, 70),
    ("consumer-0", "train", (2,), 70, 90),
    ("consumer-0", "reduce", (), 90, 93),
]
TRAINABLE: list[Order] = [
    *FROZEN,
    ("producer-0", "backward", (0,), 100, 140),
    ("producer-0", "backward", (1, 2), 140, 200),
    ("producer-0", "reduce", (), 200, 207),
    ("producer-0", "update", (), 0, 8),
]


def timeline(run_dir: Path, orders: list[Order]) -> Timeline:
    """One step of `END` milliseconds with these orders; when they ran says nothing but their order."""
    mark = Trace(run_dir, CONTROLLER)
    for track, method, slots, start, _ in sorted(orders, key=lambda order: order[3]):
        mark.add("q", track, method, *slots, start * MS)
    mark.add("m", 0, 0)
    mark.add("m", 1, END * MS)
    mark.close()
    for track in {order[0] for order in orders}:
        trace = Trace(run_dir, track)
        for _, method, _, start, end in sorted((o for o in orders if o[0] == track), key=lambda order: order[3]):
            trace.add("c", method, start * MS, end * MS)
        trace.close()
    found = read_timeline(run_dir)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("exchange", "orders", "milliseconds"),
    [
        # encodes 60, packs 70, reduce and update 8
        ("barrier_step", FROZEN, 60 + 70 + 8),
        # behind the packs: backwards 100; of the sums and updates the longer: 7 + 8
        ("barrier_step", TRAINABLE, 60 + 70 + 100 + 15),
        # pack 0 runs 20-60; slot 2 may be encoded from 60 on, and is by 70; pack 1 60-70, pack 2 70-90; reduce 3
        ("barrier_pipeline", FROZEN, 93),
        # the producer's update 8; encodes 8-28, 28-58; pack 0 28-68; encode 2 68-78; pack 1 68-78, pack 2 78-98;
        # backward 0 78-118, backwards 1 and 2 118-178; reduce 7
        ("barrier_pipeline", TRAINABLE, 185),
        # the consumer has 5 + 70 + 3, the producer 60
        ("pool", FROZEN, 78),
    ],
)
def test_one_and_one(tmp_path: Path, exchange: str, orders: list[Order], milliseconds: int) -> None:
    frozen = orders is FROZEN
    found = scheduled_seconds(timeline(tmp_path, orders), [1], exchange, colocated=False, frozen=frozen)
    assert found == pytest.approx(milliseconds / 1000)


def test_in_one_process_everything_adds_up(tmp_path: Path) -> None:
    orders = [*TRAINABLE, ("reader-0", "read", (), 300, 310)]
    found = scheduled_seconds(timeline(tmp_path, orders), [1], "pool", colocated=True, frozen=False)
    assert found == pytest.approx((60 + 70 + 100 + 5 + 3 + 8 + 7 + 10) / 1000)


def test_colocated_ranks_wait_for_the_one_that_has_most(tmp_path: Path) -> None:
    """Rank 1 has 50 ms of work and waits in the sum; the sum itself takes 3 ms."""
    other: list[Order] = [
        ("producer-1", "encode", (0,), 0, 20),
        ("consumer-1", "update", (), 0, 5),
        ("consumer-1", "train", (0,), 20, 50),
        ("consumer-1", "reduce", (), 50, 93),
    ]
    found = scheduled_seconds(timeline(tmp_path, [*FROZEN, *other]), [1], "pool", colocated=True, frozen=True)
    assert found == pytest.approx((60 + 70 + 3 + 5) / 1000)


def test_what_has_no_model_has_no_figure(tmp_path: Path) -> None:
    several: list[Any] = [*FROZEN, ("producer-1", "encode", (0,), 0, 20)]
    assert scheduled_seconds(timeline(tmp_path, several), [1], "barrier_pipeline", colocated=False, frozen=True) is None
