"""A run's folder as the page sees it: phases, charts, plan, rows, timeline, and what is hostile in it."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowtrain.errors import ConfigError
from flowtrain.telemetry.dashboard.charts import CHARTS, page_charts
from flowtrain.telemetry.dashboard.state import ELSEWHERE_SECONDS, SmallFiles
from flowtrain.telemetry.dashboard.view import RunView
from flowtrain.telemetry.metrics import METRICS

Make = Callable[..., Path]


def record(step: int, **more: Any) -> str:
    content = {"step": step, "rows": 8, "rows/skipped": 1, "loss_metrics/global_avg_loss": 1 / step}
    return json.dumps({**content, "time_metrics/end_to_end(s)": 2.0, **more}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(record(1) + record(2))
    (tmp_path / "config.yaml").write_text("train: {max_steps: 10}\nrun: {trace: false}\nmode: flow\n")
    return tmp_path


def alive(run_dir: Path) -> None:
    me = psutil.Process()
    (run_dir / "flowtrain.lock").write_text(json.dumps({"pid": me.pid, "started": me.create_time()}))


def viewed(run_dir: Path) -> RunView:
    view = RunView(run_dir)
    while view.poll():
        pass
    return view


def test_a_folder_that_no_run_wrote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunView(tmp_path)


def test_a_live_run_tells_step_total_and_time_left(run_dir: Path) -> None:
    alive(run_dir)
    state = viewed(run_dir).state()
    assert (state["phase"], state["step"], state["total"], state["left"]) == ("running", 2, 10, 16.0)


def test_epochs_are_known_once_composition_has_told_the_rows(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("train: {max_steps: null, epochs: 2}\n")
    view = viewed(run_dir)
    assert view.state()["total"] is None
    (run_dir / "decisions.jsonl").write_text(
        json.dumps({"step": 1, "kind": "composition", "num_rows": 100, "step_samples": 8}) + "\n"
    )
    view.poll()
    assert view.state()["total"] == 25


@pytest.mark.parametrize(
    ("files", "phase", "line"),
    [
        ({}, "lost", "killed"),
        ({"summary.json": {"exit": 0}}, "done", None),
        (
            {"summary.json": {"exit": 130}, "error.json": {"exit_code": 130, "line": "stopped by SIGINT"}},
            "stopped",
            "SIG",
        ),
        ({"error.json": {"exit_code": 3, "line": "row-7 has no image"}}, "failed", "row-7"),
        ({"error.json": [1], "summary.json": "no"}, "lost", "killed"),
    ],
)
def test_how_a_run_ended(run_dir: Path, files: dict[str, Any], phase: str, line: str | None) -> None:
    for name, content in files.items():
        (run_dir / name).write_text(json.dumps(content))
    state = viewed(run_dir).state()
    assert state["phase"] == phase
    assert line in state["line"] if line else state["line"] is None


def test_every_change_is_seen_and_silence_is_none(run_dir: Path) -> None:
    view = viewed(run_dir)
    version = view.version
    view.poll()
    assert view.version == version
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(record(3) + '{"step": 4, "half')
    view.poll()
    assert view.version != version
    assert view.history.step == 3
    found = view.columns(["loss_metrics/global_avg_loss"], 2, view.history.generation)
    assert found["series"] == {"loss_metrics/global_avg_loss": [[1 / 3]]}
    assert found["latest"] == {"loss_metrics/global_avg_loss": 1 / 3}


def test_a_resumed_run_that_drops_steps_is_shown_as_it_is_now(run_dir: Path) -> None:
    view = viewed(run_dir)
    aside = run_dir / "metrics.jsonl.tmp"
    aside.write_text(record(1))
    aside.replace(run_dir / "metrics.jsonl")
    view.poll()
    assert view.history.step == 1
    assert view.about()["rows"]["trained"] == 8


def test_every_metric_is_in_the_page_and_every_chart_names_declared_ones() -> None:
    declared = {metric.name for metric in METRICS}
    assert {line.metric.name for chart in CHARTS for line in chart.lines} <= declared
    names = ["grad_norm", "grad_norm/encoder", "grad_norm/backbone", "device/utilization(%)/0"]
    charts = {chart["key"]: chart for chart in page_charts(names)}
    assert [one["label"] for one in charts["grad_norm"]["series"]] == ["all modules", "encoder", "backbone"]
    assert [one["key"] for one in charts["grad_norm"]["series"]] == ["all", "encoder", "backbone"]
    assert charts["device"]["series"][0]["name"] == "device/utilization(%)/0"
    assert all(chart["empty"] for chart in charts.values())


def test_a_metric_of_another_version_is_reachable(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text(record(1, **{"new/thing": 5}))
    metrics = {one["name"]: one for one in viewed(run_dir).about()["metrics"]}
    assert metrics["new/thing"]["meaning"]
    assert metrics["time_metrics/end_to_end(s)"]["unit"] == "s"


def test_plan_says_who_runs_where(run_dir: Path) -> None:
    rank = "{device: cpu, threads: 1, segment_bytes: 0, node: %d}"
    producers = ", ".join(rank % node for node in (0, 0, 1))
    (run_dir / "plan.yaml").write_text(
        f"placement: disaggregated\nproducers: {{layout: r3, ranks: [{producers}]}}\n"
        f"consumers: {{layout: f1, ranks: [{rank % 1}]}}\n"
    )
    plan = viewed(run_dir).about()["plan"]
    assert plan["nodes"] == [{"node": "0", "who": ["producer 0-1"]}, {"node": "1", "who": ["producer 2", "consumer 0"]}]
    (run_dir / "placement.json").write_text(
        json.dumps([{"node": 3, "address": "10.0.0.3", "role": "producer", "ranks": "0-2"}])
    )
    assert viewed(run_dir).about()["plan"]["nodes"] == [{"node": "3 (10.0.0.3)", "who": ["producer 0-2"]}]


@pytest.mark.parametrize("plan", ["- [", "producers: {ranks: 5}", "producers: 7\nconsumers: {ranks: {a: b}}"])
def test_files_that_are_not_what_they_should_be_do_no_harm(run_dir: Path, plan: str) -> None:
    (run_dir / "plan.yaml").write_text(plan)
    (run_dir / "config.yaml").write_text("just text")
    (run_dir / "metrics.jsonl").write_text("[]\nnull\n{\n" + record(1))
    (run_dir / "decisions.jsonl").write_text("7\n" + json.dumps({"step": 1, "kind": "x", "long": "y" * 5000}) + "\n")
    view = viewed(run_dir)
    about = view.about()
    assert "3 lines of metrics.jsonl cannot be shown: line 1, is no JSON object" in view.state()["problems"]
    assert len(about["decisions"]) == 1
    assert len(about["decisions"][0]["text"]) < 500
    outside = run_dir / "summary.json"
    outside.symlink_to("/etc/hostname")
    assert viewed(run_dir).about()["rows"]["reasons"] == []


def problems(run_dir: Path) -> list[str]:
    told = viewed(run_dir).state()["problems"]
    assert isinstance(told, list)
    return told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"step": 1}\n\xff\xfe{"a"\n', "1 line of metrics.jsonl cannot be shown: line 2, is not UTF-8"),
        (b'{"step": 1}\n{"step": 1}\n', "1 line of metrics.jsonl cannot be shown: line 2, goes back from step 1 to 1"),
        (b'7\n{"step": 1}\n', "1 line of metrics.jsonl cannot be shown: line 1, is no JSON object"),
        (b'{"loss": 1}\n{"step": "2"}\n', "2 lines of metrics.jsonl cannot be shown: line 1, has no step"),
        (b'{"step": 1}\n{"step": 2', "The last line of metrics.jsonl is torn"),
        (b"", "There is no record in metrics.jsonl"),
        (None, "There is no record in metrics.jsonl"),
    ],
)
def test_what_of_the_records_cannot_be_shown_is_told(run_dir: Path, content: bytes | None, told: str) -> None:
    (run_dir / "summary.json").write_text('{"exit": 0}')
    assert problems(run_dir) == []
    (run_dir / "metrics.jsonl").unlink()
    if content is not None:
        (run_dir / "metrics.jsonl").write_bytes(content)
    (problem,) = problems(run_dir)
    assert problem.startswith(told)


def test_a_live_run_has_a_last_line_without_an_end_and_at_first_no_record(run_dir: Path) -> None:
    alive(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ha')
    assert problems(run_dir) == []
    (run_dir / "metrics.jsonl").unlink()
    assert problems(run_dir) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "decisions.jsonl", "config.yaml", "summary.json", "traces"])
def test_a_file_that_is_not_to_be_read_is_named_with_the_reason(run_dir: Path, name: str) -> None:
    alive(run_dir)
    (run_dir / name).unlink(missing_ok=True)
    if name == "traces":
        (run_dir / name).write_text("")
    else:
        (run_dir / name).mkdir()
    (problem,) = problems(run_dir)
    assert re.match(rf"{name} cannot be read: (Is|Not) a directory", problem)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("summary.json", b"{\n'", r"it is no JSON \(line 2\)"),
        ("config.yaml", b"a: 1\nb: [", r"it is no YAML \(line \d\)"),
        ("plan.yaml", b"\xff", "it is not UTF-8"),
    ],
)
def test_a_small_file_that_cannot_be_parsed_is_named_until_it_can(
    run_dir: Path, name: str, content: bytes, why: str
) -> None:
    alive(run_dir)
    (run_dir / name).write_bytes(content)
    view = viewed(run_dir)
    (problem,) = view.state()["problems"]
    assert re.fullmatch(rf"{name} cannot be read: {why}", problem)
    (run_dir / name).write_text("{}")
    view.poll()
    assert view.state()["problems"] == []


def test_a_run_on_another_machine_lives_as_long_as_it_writes(run_dir: Path) -> None:
    started = time.time() - 1000
    holder = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": "elsewhere"}
    (run_dir / "flowtrain.lock").write_text(json.dumps({**holder, "started": started}))
    assert viewed(run_dir).state()["phase"] == "running"
    os.utime(run_dir / "metrics.jsonl", (started, time.time() - ELSEWHERE_SECONDS - 5))
    state = viewed(run_dir).state()
    assert state["phase"] == "lost"
    assert "elsewhere has written nothing for" in state["line"]
    (run_dir / "summary.json").write_text('{"exit": 0}')
    assert viewed(run_dir).state()["phase"] == "done"


DEEP = "[" * 100_000
HUGE = "1" + "0" * 400
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "rows": "x", "rows/skipped": [1]}\n'),
        ("metrics.jsonl", f'{{"step": 1, "loss": {HUGE}, "time_metrics/end_to_end(s)": {HUGE}}}\n'),
        ("metrics.jsonl", '{"step": 1, "time_metrics/end_to_end(s)": NaN, "peak": Infinity}\n'),
        ("metrics.jsonl", f"{DEEP}\n"),
        ("metrics.jsonl", f'{{"step": {HUGE}}}\n'),
        ("decisions.jsonl", '{"step": NaN, "kind": {"a": Infinity}}\n'),
        ("decisions.jsonl", f"{DEEP}\n"),
        ("decisions.jsonl", f'{{"step": 1, "kind": "x", "a": {DEEP[:900]}{"]" * 900}}}\n'),
        ("traces/controller.jsonl", f'{DEEP}\n["m", 1, 5]\n["m", 2, {HUGE}]\n'),
        ("summary.json", '{"exit": 0, "rows": {"skipped": {"a": {"ids": 5, "count": "x"}}}}'),
        ("error.json", '{"exit_code": 3, "line": {"a": NaN}}'),
        ("placement.json", '[1, {"node": NaN, "address": [2], "role": {}, "ranks": null}]'),
        ("config.yaml", f"mode: .nan\ntrain: {{max_steps: {HUGE}}}\n"),
        ("config.yaml", DEEP),
        ("plan.yaml", "placement: 2020-01-01\ncpus: .nan\nreaders: !!binary aGVsbG8=\npool_bytes: &a [*a]\n"),
        ("plan.yaml", f"{BOMB}cpus: *i\nproducers: {{layout: *i, ranks: [{{node: *i, device: *i}}]}}\n"),
        ("flowtrain.lock", DEEP),
        ("flowtrain.lock", f'{{"pid": {HUGE}, "started": "x"}}'),
    ],
)
def test_whatever_a_file_holds_the_page_gets_json(run_dir: Path, name: str, content: str) -> None:
    alive(run_dir)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).write_text(content)
    view = viewed(run_dir)
    told = (view.state(), view.about(), view.columns(["rows", "loss"], 0, 0), view.timeline(3))
    assert len(json.dumps(told, allow_nan=False)) < 100_000


def test_what_cannot_be_parsed_is_tried_again_only_when_it_has_changed(run_dir: Path) -> None:
    """A reader looks four times a second, and a large file takes seconds."""
    files, config = SmallFiles(run_dir), run_dir / "config.yaml"
    config.write_text("[1")
    before = os.stat(config).st_mtime_ns
    assert files.read("config.yaml") is None
    config.write_text("12")
    os.utime(config, ns=(before, before))
    assert files.read("config.yaml") is None
    os.utime(config, ns=(before, before + 1))
    assert files.read("config.yaml") == 12


def test_reasons_of_skipped_rows_are_counted_while_the_run_lives(run_dir: Path) -> None:
    by_reason = [
        {"rows/skipped/too-long": 2, "rows/skipped": 3, "rows/skipped/template": 1},
        {"rows/skipped/too-long": 1},
    ]
    lines = [record(step, **{"rows/skipped": 1, **more}) for step, more in enumerate(by_reason, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    reasons = [(one["reason"], one["count"], one["ids"]) for one in viewed(run_dir).about()["rows"]["reasons"]]
    assert reasons == [("too-long", 3, []), ("template", 1, [])]
    skipped = {"template": {"count": 5, "ids": ["row-1"]}}
    (run_dir / "summary.json").write_text(json.dumps({"exit": 0, "rows": {"skipped": skipped}}))
    reasons = [(one["reason"], one["count"], one["ids"]) for one in viewed(run_dir).about()["rows"]["reasons"]]
    assert reasons == [("template", 5, ["row-1"])], "the summary has all of them, those behind the last step too"


def write_trace(run_dir: Path, name: str, *events: tuple[Any, ...]) -> None:
    folder = run_dir / "traces"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def test_the_timeline_is_of_the_newest_steps_on_one_clock(run_dir: Path) -> None:
    us = 1000
    write_trace(run_dir, "controller", ("o", "consumer-0", 500 * us), ("m", 1, 1000 * us), ("m", 2, 2000 * us))
    write_trace(run_dir, "consumer-0", ("s", "forward", 1600 * us, 1800 * us), ("c", "train", 1500 * us, 2000 * us))
    view = viewed(run_dir)
    window = view.timeline(1)["window"]
    assert (window["steps"], window["length"]) == ([2, 2], 1000)
    consumer = window["tracks"][1]
    assert consumer["pieces"] == [("assemble", 0, 100), ("forward", 100, 200), ("assemble", 300, 200)]
    assert consumer["shares"] == pytest.approx({"assemble": 0.3, "forward": 0.2})
    before = view.version
    write_trace(run_dir, "controller", ("m", 3, 2500 * us))
    view.poll()
    assert view.version != before
    assert view.timeline(1)["window"]["steps"] == [3, 3]
    assert view.timeline(9)["window"]["steps"] == [2, 3]


def test_without_a_trace_there_is_no_window(run_dir: Path) -> None:
    view = viewed(run_dir)
    assert view.timeline(3) == {"version": 0, "window": None}
    assert view.about()["traced"] is False


def test_reading_needs_no_right_to_write(run_dir: Path) -> None:
    before = {entry.name: os.stat(entry).st_mtime_ns for entry in run_dir.iterdir()}
    viewed(run_dir).about()
    assert {entry.name: os.stat(entry).st_mtime_ns for entry in run_dir.iterdir()} == before
