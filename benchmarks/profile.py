"""Predicted against measured samples/s on this machine: `python -m benchmarks.profile --json FILE --check`.

    profile (rows from the end of the order, other sizes of packs) ─▶ predictions, written to disk ─▶ runs, judged
    └───────────────────────────────────────── a repetition ──────────────────────────────────────────────┘ × 5

| judged | processes |
|---|---|
| `disaggregated` | one producer and one consumer, the cores divided between them |
| `colocated` | one process with all cores |
| `auto` | what `allocation.placement: auto` takes with the profile |

The job is `examples/emoji`. A run's rate is the median over its steps in metrics.jsonl of rows over seconds, the first
`SKIPPED` left out: they fill the pipeline and warm the processes up. All rows over all seconds is shown beside it: less
than the median where other programs took the cores now and then. Each repetition has a seed of its own, and measures a
profile and both runs anew. The pace of a shared machine changes between a profile and its runs; repetitions are short
and the median of the errors is checked, each error shown. `drift` tells how much of an error both runs have in common.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Check, Result, main

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/emoji/emoji.yaml"
NUM_STEPS = 16
SKIPPED = 4
REPETITIONS = 5
PROFILE_SECONDS = 40
MOST_ERROR = 0.15
MOST_LOST = 0.02
"""Where placements differ by less, runs of one placement differ by more than the two do."""

NAMES = {"disaggregated": "1 producer, 1 consumer", "colocated": "colocated"}
OPEN = ("producers.threads=null", "consumers.threads=null")
LIMIT = ("--limit", str(PROFILE_SECONDS))
QUIET = ("telemetry.progress=off", "checkpoint.export=false", "data.eval=null", f"train.max_steps={NUM_STEPS}")


def flowtrain(*arguments: str) -> str:
    """Run the command line; its output. Fails with what it said."""
    command = [sys.executable, "-m", "flowtrain.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=900, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def overrides(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def predicted_rates(folder: Path, seed: int) -> dict[str, float]:
    """Measure a profile; what it predicts is on disk before any run."""
    file = folder / "predicted.json"
    sides = overrides(f"run.dir={folder / 'run'}", f"run.seed={seed}", *OPEN)
    flowtrain("profile", str(EXAMPLE), "--out", str(folder / "profile.yaml"), "--json", str(file), *sides, *LIMIT)
    predicted = json.loads(file.read_text())["predicted"]
    return {placement: predicted[name]["samples_per_second"] for placement, name in NAMES.items()}


def measured_rates(folder: Path, placement: str, seed: int) -> tuple[float, float]:
    """Rows a second of a run, its first steps left out: median of the steps, and over all of them."""
    run_dir = folder / placement
    keys = overrides(f"run.dir={run_dir}", f"run.seed={seed}", f"allocation.placement={placement}", *OPEN, *QUIET)
    flowtrain("launch", str(EXAMPLE), *keys)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = [record for record in records if record["step"] > SKIPPED]
    rates = [record["rows"] / record["time_metrics/end_to_end(s)"] for record in steady]
    overall = sum(r["rows"] for r in steady) / sum(r["time_metrics/end_to_end(s)"] for r in steady)
    return median(rates), overall


def chosen(folder: Path, seed: int) -> str:
    """The placement that the allocator takes with the profile."""
    keys = overrides(
        f"run.seed={seed}", "allocation.placement=auto", f"allocation.profile={folder / 'profile.yaml'}", *OPEN
    )
    file = folder / "plan.json"
    flowtrain("launch", str(EXAMPLE), "--dry-run", "--json", str(file), *keys)
    placement: str = json.loads(file.read_text())["plan"]["placement"]
    return placement


def measure(seed: int) -> Result:
    table: list[dict[str, Any]] = []
    errors: dict[str, list[float]] = {placement: [] for placement in NAMES}
    lost: list[float] = []
    for repetition in range(REPETITIONS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            predicted = predicted_rates(folder, seed + repetition)
            choice = chosen(folder, seed + repetition)
            both = {placement: measured_rates(folder, placement, seed + repetition) for placement in NAMES}
        measured = {placement: rates[0] for placement, rates in both.items()}
        faster = max(measured, key=lambda placement: measured[placement])
        lost.append(measured[faster] / measured[choice] - 1.0)
        for placement in NAMES:
            errors[placement].append(predicted[placement] / measured[placement] - 1.0)
        drift = sum(of_placement[-1] for of_placement in errors.values()) / len(errors)
        table += [
            {
                "repetition": repetition,
                "placement": placement,
                "predicted samples/s": predicted[placement],
                "measured samples/s": measured[placement],
                "error %": 100 * errors[placement][-1],
                "drift %": 100 * drift,
                "all rows over all seconds": both[placement][1],
                "chosen": choice == placement,
                "faster": faster == placement,
            }
            for placement in NAMES
        ]
    checks = [
        Check(f"error of {placement}, median of {REPETITIONS}", median(map(abs, found)), "<=", MOST_ERROR)
        for placement, found in errors.items()
    ]
    checks.append(Check(f"lost by the allocator's choice, median of {REPETITIONS}", median(lost), "<=", MOST_LOST))
    settings = {"config": str(EXAMPLE.name), "steps": NUM_STEPS, "skipped": SKIPPED, "repetitions": REPETITIONS}
    return Result(settings, table, checks)


if __name__ == "__main__":
    main("profile", lambda options: measure(options.seed))
