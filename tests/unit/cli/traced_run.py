"""The folder of a traced run of four steps, written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from flowtrain.config.loading import dump_resolved, load_config
from flowtrain.telemetry.trace import CONTROLLER

MS = 1_000_000
STEPS = 4


def write_run(run_dir: Path, emoji: Path, *overrides: str) -> Path:
    """Four steps of 100 ms: the producer encodes for 40, then a pack takes 60 with 10 of `assemble`."""
    config = load_config(emoji / "emoji.yaml", (*overrides, f"run.dir={run_dir}")).config
    (run_dir / "traces").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_resolved(config))
    lines: dict[str, list[list[object]]] = {CONTROLLER: [["m", 0, 0]], "producer-0": [], "consumer-0": []}
    for step in range(1, STEPS + 1):
        at = (step - 1) * 100 * MS
        lines[CONTROLLER] += [["q", "producer-0", "encode", 0, at], ["a", "producer-0", "encode", at + 40 * MS]]
        lines[CONTROLLER] += [["q", "consumer-0", "train", 0, at + 40 * MS]]
        lines[CONTROLLER] += [["a", "consumer-0", "train", at + 100 * MS], ["m", step, at + 100 * MS]]
        lines["producer-0"] += [["s", "encode", at, at + 40 * MS], ["c", "encode", at, at + 40 * MS]]
        lines["consumer-0"] += [["s", "forward", at + 50 * MS, at + 100 * MS], ["t", 2 * step, step * MS]]
        lines["consumer-0"] += [["c", "train", at + 40 * MS, at + 100 * MS]]
    for name, events in lines.items():
        (run_dir / f"traces/{name}.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    records = [{"step": step, "time_metrics/telemetry(s)": 0.002} for step in range(1, STEPS + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (run_dir / "summary.json").write_text(json.dumps({"wall_s": 1.2}))
    return run_dir
