"""The trace of a run: what processes record, one clock, every moment named, and where the time of a step goes.

A step of the tests, in milliseconds; P is the producer, C the consumer; the controller sends its updates late:

    P   |encode 0-40 (decode 0-10, encode 10-40)|            |backward 70-90|         |update 95-100|
    C                              wait          |train 42-68 (forward 42-50, backward 50-68)|  |update 95-99|
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flowtrain.telemetry import trace as trace_module
from flowtrain.telemetry.losses import break_down, critical_path, in_turns
from flowtrain.telemetry.spans import Spans
from flowtrain.telemetry.timeline import Call, Piece, Timeline, Track, read_timeline, write_chrome_trace
from flowtrain.telemetry.trace import CONTROLLER, MAX_EVENTS, Trace, clear_traces

MS = 1_000_000


def write(run_dir: Path, name: str, *events: tuple[Any, ...]) -> None:
    trace = Trace(run_dir, name)
    for event in events:
        trace.add(*(part * MS if isinstance(part, int) and number > 0 else part for number, part in enumerate(event)))
    trace.close()


def one_step(run_dir: Path, offset: int = 0) -> Timeline:
    """`offset`: how far the consumer's clock is ahead."""
    mark = Trace(run_dir, CONTROLLER)
    for track, method, sent, taken in (
        ("producer-0", "encode", 0, 41),
        ("consumer-0", "train", 41, 69),
        ("producer-0", "backward", 69, 91),
        ("producer-0", "update", 94, 101),
        ("consumer-0", "update", 94, 100),
    ):
        mark.add("q", track, method, sent * MS)
        mark.add("a", track, method, taken * MS)
    mark.add("m", 0, 0)
    mark.add("m", 1, 94 * MS)
    mark.add("o", "consumer-0", offset * MS)
    mark.add("s", "wait", 1 * MS, 41 * MS)
    mark.close()
    write(
        run_dir,
        "producer-0",
        ("s", "decode", 0, 10),
        ("s", "encode", 10, 40),
        ("c", "encode", 0, 40),
        ("s", "backward", 72, 90),
        ("c", "backward", 70, 90),
        ("c", "update", 95, 100),
    )
    consumer = [
        ("s", "forward", 44, 50),
        ("s", "backward", 50, 68),
        ("c", "train", 42, 68),
        ("c", "update", 95, 99),
    ]
    write(run_dir, "consumer-0", *((kind, name, start + offset, end + offset) for kind, name, start, end in consumer))
    timeline = read_timeline(run_dir)
    assert timeline is not None
    return timeline


def milliseconds(pieces: Any) -> list[tuple[str, float, float]]:
    return [(piece.name, piece.start / MS, piece.end / MS) for piece in pieces]


@pytest.mark.parametrize("offset", [0, 5000, -7])
def test_every_moment_has_one_name_on_one_clock(tmp_path: Path, offset: int) -> None:
    producer, consumer = one_step(tmp_path, offset).tracks
    assert milliseconds(producer.pieces()) == [
        ("decode", 0, 10),
        ("encode", 10, 40),
        ("wait", 40, 69),
        ("messages", 69, 70),
        ("return gradient", 70, 72),
        ("backward", 72, 90),
        ("wait", 90, 94),
        ("messages", 94, 95),
        ("optimizer", 95, 100),
    ]
    assert milliseconds(consumer.pieces())[:3] == [("assemble", 42, 44), ("forward", 44, 50), ("backward", 50, 68)]


def test_the_critical_path_goes_from_answer_to_answer(tmp_path: Path) -> None:
    path = critical_path(one_step(tmp_path), 1)
    assert [(segment.track, *piece) for segment, piece in zip(path, milliseconds(path), strict=True)] == [
        ("producer-0", "decode", 0, 10),
        ("producer-0", "encode", 10, 40),
        ("producer-0", "messages", 40, 41),
        ("consumer-0", "messages", 41, 42),
        ("consumer-0", "assemble", 42, 44),
        ("consumer-0", "forward", 44, 50),
        ("consumer-0", "backward", 50, 68),
        ("consumer-0", "messages", 68, 69),
        ("producer-0", "messages", 69, 70),
        ("producer-0", "return gradient", 70, 72),
        ("producer-0", "backward", 72, 90),
        ("producer-0", "messages", 90, 91),
        ("controller", "decide", 91, 94),
    ]


def test_ideal_and_losses_add_up_to_the_step(tmp_path: Path) -> None:
    """Of the step's 94 ms on two devices the models took 30 + 18 on the producer and 24 on the consumer."""
    found = break_down(one_step(tmp_path), colocated=False)
    assert found is not None
    assert (found.steps, found.step) == ((1,), 1)
    assert found.ideal_seconds == pytest.approx((30 + 18 + 24) / 2 / 1000)
    assert found.ideal_seconds + sum(found.losses.values()) == pytest.approx(found.step_seconds) == 0.094
    largest = list(found.losses.items())[:3]
    assert [(name, round(2000 * seconds)) for name, seconds in largest] == [
        ("starvation: consumers wait for features", 68),
        ("stall: producers wait for room or orders", 33),
        ("decode (producer)", 10),
    ]
    assert found.shares["producer"]["decode"] == pytest.approx(10 / 94)
    assert sum(found.path.values()) == pytest.approx(0.094)
    assert next(iter(found.path)) == ("producer", "encode")


def test_in_one_process_one_sides_waiting_is_the_others_work(tmp_path: Path) -> None:
    found = break_down(one_step(tmp_path), colocated=True)
    assert found is not None
    assert found.ideal_seconds == pytest.approx(0.072)
    assert found.ideal_seconds + sum(found.losses.values()) == pytest.approx(0.094)
    assert not [name for name in found.losses if "starvation" in name or "stall" in name]
    assert found.losses["controller, readers and messages"] == pytest.approx((2 + 2 + 4) / 1000)
    assert sum(found.path.values()) == pytest.approx(0.094)
    assert found.path["controller", "decide"] == pytest.approx((2 + 2 + 4) / 1000)


def test_the_way_through_colocated_ranks_changes_sides_within_a_process(tmp_path: Path) -> None:
    """Rank 0 encodes 0-10 and trains 10-30, both sent at the start; rank 1 is done at 12."""
    mark = Trace(tmp_path, CONTROLLER)
    calls = {
        "producer-0": ("encode", 0, 10, 11),
        "consumer-0": ("train", 10, 30, 31),
        "producer-1": ("encode", 0, 5, 6),
        "consumer-1": ("train", 5, 12, 13),
    }
    for track, (method, start, end, taken) in calls.items():
        mark.add("q", track, method, 0, 0)
        mark.add("a", track, method, taken * MS)
        write(tmp_path, track, ("s", "forward", start, end), ("c", method, start, end))
    mark.add("m", 0, 0)
    mark.add("m", 1, 32 * MS)
    mark.close()
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    assert timeline.tracks[0].calls[0].slots == (0,)
    found = break_down(timeline, colocated=True)
    assert found is not None
    assert [(segment.track, segment.name, segment.end // MS) for segment in found.segments] == [
        ("producer-0", "forward", 10),
        ("consumer-0", "forward", 30),
        ("consumer-0", "messages", 31),
        ("controller", "decide", 32),
    ]
    assert found.ideal_seconds == pytest.approx((30 + 12) / 2 / 1000)
    assert found.ideal_seconds + sum(found.losses.values()) == pytest.approx(0.032)


def test_the_way_through_a_step_looks_at_the_orders_of_that_step_alone() -> None:
    """What orders of other steps did is not read, let alone sorted, for each of the steps again."""

    def order(at: int, *pieces: Piece) -> Call:
        return Call("train", at * MS, (at + 50) * MS, at * MS, None, pieces)

    unread = order(0)._replace(pieces=None)  # type: ignore[arg-type]
    calls = [unread, order(100, Piece("forward", 100 * MS, 150 * MS)), unread._replace(start=200 * MS, end=250 * MS)]
    marks = {step: step * 100 * MS for step in range(4)}
    timeline = Timeline([Track("consumer-0", calls)], [], marks, [], {})
    assert [(segment.name, segment.seconds) for segment in in_turns(timeline, 2)] == [
        ("forward", 0.05),
        ("decide", 0.05),
    ]


def test_orders_that_queue_are_followed_on_their_rank(tmp_path: Path) -> None:
    """Two units sent at once: the second one's way begins with the first one."""
    mark = Trace(tmp_path, CONTROLLER)
    for sent, taken in ((0, 22), (0, 32)):
        mark.add("q", "producer-0", "encode", sent * MS)
        mark.add("a", "producer-0", "encode", taken * MS)
    mark.add("m", 0, 0)
    mark.add("m", 1, 32 * MS)
    mark.close()
    write(tmp_path, "producer-0", ("c", "encode", 2, 20), ("c", "encode", 21, 30))
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    assert milliseconds(critical_path(timeline, 1)) == [
        ("messages", 0, 2),
        ("other", 2, 20),
        ("messages", 20, 21),
        ("other", 21, 30),
        ("messages", 30, 32),
    ]


def test_perfetto_gets_a_track_a_process_and_arrows(tmp_path: Path) -> None:
    write_chrome_trace(one_step(tmp_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "controller", 1: "producer-0", 2: "consumer-0"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert {"name": "decode", "ph": "X", "pid": 1, "tid": 0, "ts": 0.0, "dur": 10000.0} in boxes
    assert {event["name"] for event in boxes if event["pid"] == 0} == {"wait"}
    starts, ends = ({event["id"]: event["ts"] for event in events if event["ph"] == kind} for kind in "sf")
    assert len(starts) == 5
    assert all(ends[arrow] >= at for arrow, at in starts.items())


# --- recording --------------------------------------------------------------------------------------------------------


def test_spans_are_recorded_within_their_order(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "spans" / "producer-0", Trace(tmp_path, "producer-0"))
    with spans.order("encode"):
        with spans("decode"):
            time.sleep(0.002)
        with spans("encode"):
            pass
    spans.close()
    with (tmp_path / "traces" / "producer-0.jsonl").open("a") as file:
        file.write('["s", "torn')
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    [call] = timeline.tracks[0].calls
    assert (call.method, call.sent) == ("encode", None)
    assert sum(piece.end - piece.start for piece in call.pieces) == call.end - call.start
    assert "probe" not in {piece.name for piece in call.pieces}
    assert sum(piece.end - piece.start for piece in call.pieces if piece.name == "decode") >= 2 * MS
    assert 0 < timeline.cost_seconds["producer-0"] < 0.1


def test_memory_and_disk_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 5000)
    trace = Trace(tmp_path, "consumer-0")
    most = 0
    for number in range(20_000):
        trace.add("s", "forward", number, number + 1)
        most = max(most, len(trace._held))
    trace.close()
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()]
    assert most < trace_module.LUMP
    assert sum(line[0] == "s" for line in lines) == 5000 < MAX_EVENTS
    assert lines[-1][:2] == ["t", 5000]


def test_traces_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) is None
    one_step(tmp_path)
    clear_traces(tmp_path)
    assert read_timeline(tmp_path) is None


def test_a_trace_without_a_whole_step_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, "producer-0", ("c", "encode", 0, 40))
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    assert break_down(timeline, colocated=False) is None


def _steps(run_dir: Path, num_recorded: int) -> Timeline:
    """Three steps of 100 ms: the producer encodes for the first 60; its file holds `num_recorded` orders."""
    mark = Trace(run_dir, CONTROLLER)
    mark.add("m", 0, 0)
    for step in range(3):
        mark.add("q", "producer-0", "encode", 100 * step * MS)
        mark.add("q", "producer-0", "devices", 100 * step * MS)
        mark.add("m", step + 1, 100 * (step + 1) * MS)
    mark.close()
    write(run_dir, "producer-0", *(("c", "encode", 100 * step, 100 * step + 60) for step in range(num_recorded)))
    timeline = read_timeline(run_dir)
    assert timeline is not None
    return timeline


def test_steps_that_a_process_did_not_record_are_not_looked_at(tmp_path: Path) -> None:
    """Else its missing work is taken for waiting. Orders that no process records say nothing."""
    assert _steps(tmp_path, 3).steps == [1, 2, 3]
    cut = _steps(tmp_path, 2)
    assert cut.steps == [1, 2]
    found = break_down(cut, colocated=False)
    assert found is not None
    assert found.steps == (2,)
    assert found.shares["producer"]["other"] == pytest.approx(0.6)


def test_as_many_steps_as_asked_for_are_warm_up(tmp_path: Path) -> None:
    found = break_down(_steps(tmp_path, 3), colocated=False, warmup=2)
    assert found is not None
    assert found.steps == (3,)
