"""The memory pool against plain memory and against Ray's object store, in one run on one machine.

    python -m benchmarks.pool --json FILE [--check] [--trace FILE] [--journals DIR]

| group | figure |
|---|---|
| copy | put + get of a block against a plain `torch` copy of the same bytes (`flowtrain.pool.measure`) |
| ray | put in one process and get in another against `ray.put` and `ray.get` between two actors: tensors, arrays |
| second reader | get of a block that another reader has got already, by its size |
| arena | `benchmarks.pool_arena`: fragmentation, and reserve + release a second |
| jobs | the digits and the emoji job with the pool between processes and within one: same losses, share of the pool |
| nixl | `benchmarks.pool_nixl`, where it is installed |
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import pool_arena, pool_nixl
from benchmarks.record import Check, Result, main
from flowtrain.pool.measure import MIB, copy_time, second_reader_seconds
from flowtrain.pool.transport.nixl_agent import why_missing

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {64: 0.90, 16: 0.85, 1: 0.60}
"""Block in MiB → least speed of put + get over that of a plain copy."""

RAY_RATIO = 15.0
SECOND_READER_SECONDS = 50e-6
POOL_SHARE = 0.01
JOBS = ("digits", "emoji")
"""Examples as they are, steps of 32 rows."""

STEPS = 12
WARM_UP_STEPS = 2
JOB_SECONDS = 170.0

Rows = list[dict[str, Any]]


def copies() -> tuple[Rows, list[Check]]:
    rows, checks = [], []
    for mib, limit in LIMITS.items():
        found = copy_time(mib * MIB)
        rows.append(_row(f"put + get, {mib} MiB, over a plain copy", found.ratio, "x"))
        rows.append(_row(f"plain copy, {mib} MiB", mib * MIB / found.plain_seconds / 1e9, "GB/s"))
        checks.append(Check(f"put_get_over_copy_{mib}MiB", found.ratio, ">=", limit))
    for mib in LIMITS:
        seconds = second_reader_seconds(mib * MIB)
        rows.append(_row(f"second reader, {mib} MiB", 1e6 * seconds, "us"))
        checks.append(Check(f"second_reader_seconds_{mib}MiB", seconds, "<=", SECOND_READER_SECONDS))
    return rows, checks


def against_ray() -> tuple[Rows, list[Check]]:
    """Checked is what is alike: tensors put and got, Ray as it comes. Its other ways are in the rows."""
    from flowtrain.runtime.pool_bench import TENSORS, ray_rows

    rows = ray_rows(None)
    ratio = next(row["value"] for row in rows if row["figure"].startswith(f"pool over Ray, {TENSORS}, 16 MiB"))
    return rows, [Check("put_get_over_ray_tensors_16MiB", ratio, ">=", RAY_RATIO)]


def job(example: str, placement: str, folder: Path) -> list[dict[str, Any]]:
    """The step records of a short run of an example."""
    run_dir = folder / f"{example}-{placement}"
    overrides = [
        f"run.dir={run_dir}",
        f"train.max_steps={STEPS}",
        "train.epochs=null",
        "data.eval=null",
        "checkpoint.export=false",
        "telemetry.progress=off",
        "cluster.oversubscribe=true",
        f"allocation.placement={placement}",
    ]
    command = [sys.executable, "-m", "flowtrain.cli.main", "launch", str(ROOT / f"examples/{example}/{example}.yaml")]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, cwd=ROOT, check=True, timeout=JOB_SECONDS, capture_output=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def jobs() -> tuple[Rows, list[Check]]:
    """Losses with and without processes between the halves; time in the pool, of all processes, as a share of the step.

    The median step counts: a process that is put aside in the middle of a call counts the time of whatever else runs.
    """
    rows, checks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for example in JOBS:
            runs = {place: job(example, place, Path(folder)) for place in ("disaggregated", "colocated")}
            ours, plain = ([record["loss_hex"] for record in run] for run in runs.values())
            worst = max(abs(float.fromhex(a) / float.fromhex(b) - 1) for a, b in zip(ours, plain, strict=True))
            steady = runs["disaggregated"][WARM_UP_STEPS:]
            shares = [record["pool/seconds"] / record["time_metrics/end_to_end(s)"] for record in steady]
            share = statistics.median(shares)
            rows.append(_row(f"{example}: relative difference of the loss, {len(ours)} steps", worst, ""))
            rows.append(_row(f"{example}: time in the pool, median step", 100 * share, "% of the step"))
            rows.append(_row(f"{example}: time in the pool, worst step", 100 * max(shares), "% of the step"))
            checks.append(Check(f"{example}_pool_share_of_step", share, "<=", POOL_SHARE))
            checks.append(Check(f"{example}_loss_difference", worst, "<=", 1e-6))
    return rows, checks


def measure(seed: int, journals: Path | None, trace: Path) -> Result:
    rows, checks = copies()
    arena = pool_arena.measure(seed, journals, trace)
    for group_rows, group_checks in (against_ray(), jobs()):
        rows += group_rows
        checks += group_checks
    if why_missing() is None:
        nixl = pool_nixl.measure(seed)
        checks += nixl.checks
        rows += [_row(f"NIXL read, 64 MiB, {row['carrier']}, {row['side']}", row["GB/s"], "GB/s") for row in nixl.rows]
    for row in arena.rows:
        load = row["recorded: first failure at load"]
        rows.append(_row(f"{row['arena']}: first failure on recorded lifetimes at load", load, ""))
        rows.append(_row(f"{row['arena']}: failures on random lifetimes at load 0.85", row[pool_arena.RANDOM_85], "%"))
    return Result(dict(arena.settings), rows, [*checks, *arena.checks])


def _row(figure: str, value: Any, unit: str) -> dict[str, Any]:
    return {"figure": figure, "value": value, "unit": unit}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--journals", type=Path, help="folder of run folders with a pool.csv")
    parser.add_argument("--trace", type=Path, default=pool_arena.TRACE, help="parquet file with n_vision_tokens")
    main("pool", lambda options: measure(options.seed, options.journals, options.trace), parser)
