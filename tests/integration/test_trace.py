"""Traced runs: what their tracks show, what the report says, and what the modes let overlap."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from integration_runs import Train, make_config

from flowtrain.cli.report import Report, read_report
from flowtrain.cli.report_page import page
from flowtrain.config.resolved import dump_resolved
from flowtrain.telemetry.losses import critical_path
from flowtrain.telemetry.timeline import Timeline

STEPS = 3
SHORT = (
    "run.trace=true",
    f"train.max_steps={STEPS}",
    "train.epochs=null",
    "data.eval=null",
    "train.step={samples: 16}",
    "packing={max_tokens: 512, lookahead: 1}",
    "telemetry.sinks=[prometheus]",
    "telemetry.prometheus_port=0",
)


def traced(train: Train, name: str, *overrides: str) -> tuple[Path, Report, Timeline]:
    run_dir = train("emoji", *SHORT, *overrides, name=name)
    (run_dir / "config.yaml").write_text(dump_resolved(make_config("emoji", run_dir, *SHORT, *overrides)))
    return run_dir, *read_report(run_dir)


def rows_of_steps(run_dir: Path) -> list[set[str]]:
    packs = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [{row for pack in packs if pack["step"] == step for row in pack["ids"]} for step in range(1, STEPS + 1)]


def busy(timeline: Timeline, side: str, *names: str) -> list[tuple[int, int]]:
    tracks = [track for track in timeline.tracks if track.side == side]
    return [(p.start, p.end) for track in tracks for p in track.pieces() if p.name in names]


def overlapping(timeline: Timeline) -> int:
    """Nanoseconds in which the encoder encodes while a pack runs."""
    packs = busy(timeline, "consumer", "forward", "backward")
    return sum(
        max(min(end, to) - max(start, at), 0) for start, end in busy(timeline, "producer", "encode") for at, to in packs
    )


@pytest.mark.timeout(240)
def test_a_trace_accounts_for_every_moment_and_modes_differ_in_what_overlaps(train: Train) -> None:
    flow_dir, made, timeline = traced(train, "flow")
    assert [track.name for track in timeline.tracks] == ["reader-0", "producer-0", "consumer-0"]
    shares = made.breakdown.shares
    assert {"decode", "preprocess", "encode", "put", "backward", "wait", "messages"} <= shares["producer"].keys()
    assert {"assemble", "forward", "backward", "reduce", "optimizer", "wait"} <= shares["consumer"].keys()
    assert shares["controller"].keys() == {"orders", "wait", "answers"}
    for side in ("producer", "consumer"):
        assert sum(shares[side].values()) == pytest.approx(1)
    found = made.breakdown
    assert found.ideal_seconds + sum(found.losses.values()) == pytest.approx(found.step_seconds)
    for step in found.steps:
        begin, end = timeline.step(step) or (0, 0)
        path = critical_path(timeline, step)
        assert (path[0].start, path[-1].end) == (begin, end)
        assert all(before.end == after.start for before, after in itertools.pairwise(path))
        assert "before the trace" not in {segment.name for segment in path}
    assert made.telemetry_share is not None
    assert made.telemetry_share <= 0.01
    events = json.loads((flow_dir / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"encode", "forward", "messages", "end of step 2"}
    shown = page(made, timeline)
    assert shown.count("<svg") == 2
    assert "http" not in shown

    step_dir, _, of_steps = traced(train, "step", "mode=disaggregated", "pool.exchange=barrier_step")
    assert overlapping(of_steps) == 0 < overlapping(timeline)
    assert rows_of_steps(step_dir) == rows_of_steps(flow_dir), "the same rows a step, whatever the mode"


def test_one_process_has_one_clock_and_no_starvation(train: Train) -> None:
    _, made, timeline = traced(train, "one", "mode=monolithic")
    assert {track.name for track in timeline.tracks} == {"reader-0", "producer-0", "consumer-0"}
    found = made.breakdown
    assert found.ideal_seconds + sum(found.losses.values()) == pytest.approx(found.step_seconds)
    assert {"return gradient", "backward"} <= made.breakdown.shares["producer"].keys()
    assert not [name for name in found.losses if "starvation" in name]
    assert sum(found.path.values()) == pytest.approx(found.step_seconds)
    ordered = sorted(call.start for track in timeline.tracks for call in track.calls)
    ends = sorted(call.end for track in timeline.tracks for call in track.calls)
    assert all(end <= start for end, start in zip(ends, ordered[1:], strict=False)), "orders take turns"
