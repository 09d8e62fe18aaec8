"""A made run of 100,000 steps and 64 ranks in the dashboard: time until charts are drawn, memory of the page.

*cold*: the page is opened as the server begins to read; *warm*: the server has read all. Limits: 2 s, 300 MiB.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.chromium import Chromium
from benchmarks.record import Check, Result, main
from flowtrain.telemetry.dashboard.serve import serving
from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind

STEPS, RANKS, PRODUCERS = 100_000, 64, 16
MOST_SECONDS, MOST_BYTES = 2.0, 300 << 20
DRAWN = "document.querySelectorAll('[data-chart] .plot canvas').length >= 3"
WHOLE = f"document.querySelector('[data-chart=loss] .plot').card.runs[0].columns.steps.at(-1) === {STEPS}"
SHOW_ALL = """document.querySelectorAll('[data-chart] .plot').forEach((plot) => {
    plot.card.visible = true; plot.card.update(); })"""
STEP_NS, PIECES = 1_000_000_000, 40


def make_run(folder: Path, seed: int) -> int:
    """Write the run; returns the bytes of its metrics.jsonl. Every metric of the table, and one of each rank."""
    chance = random.Random(seed)
    numbers = [metric.of("encoder") for metric in METRICS if metric.kind is not Kind.FACT]
    numbers += [f"device/utilization(%)/{rank}" for rank in range(RANKS)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            record: dict[str, Any] = {"step": step, **{name: round(50 * chance.random(), 4) for name in numbers}}
            file.write(json.dumps(record) + "\n")
    (folder / "config.yaml").write_text(f"train: {{max_steps: {STEPS}}}\nrun: {{trace: true}}\n")
    (folder / "summary.json").write_text(json.dumps({"exit": 0}))
    _write_traces(folder / "traces")
    return (folder / "metrics.jsonl").stat().st_size


def _write_traces(folder: Path) -> None:
    folder.mkdir()
    ends = [["m", step, step * STEP_NS] for step in range(1, 21)]
    (folder / "controller.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ends))
    length = STEP_NS // PIECES
    for rank in range(RANKS):
        name = f"producer-{rank}" if rank < PRODUCERS else f"consumer-{rank - PRODUCERS}"
        starts = range(0, 20 * STEP_NS, length)
        calls = [["c", "encode" if rank < PRODUCERS else "train", at, at + length * 3 // 4] for at in starts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in calls))


def look(address: str, name: str) -> dict[str, Any]:
    """Open the page until charts are drawn, then until the whole run is there with every chart drawn."""
    with Chromium() as page:
        began = time.monotonic()
        page.open(address)
        page.until(DRAWN, "charts", within=60)
        drawn = time.monotonic() - began
        page.until(WHOLE, "the last step", within=300)
        whole = time.monotonic() - began
        page.value(SHOW_ALL)
        page.until("document.querySelector('canvas.time').ariaLabel !== null", "the timeline")
        assert page.complaints == []
        return {"server": name, "charts_s": drawn, "whole_s": whole, "page_MiB": page.memory_bytes() / 2**20}


def measure(options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_run(folder, options.seed)
        with serving([folder]) as address:
            cold = look(address, "cold")
            state = json.load(urllib.request.urlopen(f"{address}api/runs", timeout=60))[0]["state"]
            warm = look(address, "warm")
    checks = [
        Check("charts_s_cold", cold["charts_s"], "<=", MOST_SECONDS),
        Check("charts_s_warm", warm["charts_s"], "<=", MOST_SECONDS),
        Check("page_bytes", max(cold["page_MiB"], warm["page_MiB"]) * 2**20, "<=", MOST_BYTES),
        Check("steps", state["step"], "==", STEPS),
    ]
    settings = {"steps": STEPS, "ranks": RANKS, "metrics": state["names"], "metrics_jsonl_MiB": size / 2**20}
    return Result(settings, [cold, warm], checks)


if __name__ == "__main__":
    main("dashboard", measure)
