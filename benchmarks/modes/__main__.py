"""`python -m benchmarks.modes JOB --json FILE`: makes the job, runs `flowtrain bench`, says whether the ratios hold.

Loads are made what the job says on the machine at hand: short runs of `flow` before the first round say how deep the
vision tower has to be. With `--add` the rounds are put behind those that FILE holds, so that a long measurement can
be made in pieces. With `--against FILE` the ratios are compared with those of an earlier record, on the model of that
record, and the exit code is 1 when one is more than `--tolerance` lower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.modes.make import JOBS, make_job
from benchmarks.modes.record import Record, as_record, by_other, checks, joined, load_ratio, of_limit, rates
from benchmarks.record import Check, environment, table

MODES = {
    "1:1": "flow,disaggregated,barrier_step,monolithic,monolithic_dynamic,without_pool",
    "1:3": "flow,monolithic_dynamic,one_process,auto",
}
"""By the loads of the job: of uneven ones, what the allocator may choose and what it does."""

TIMEOUT_SECONDS = 900
LOADS = {"1:1": 0.96, "1:3": 0.33}
"""Producers' load by the consumers'. Decode and preparation come on top of it, which is why an allocation, too, leaves
its producers some headroom."""
NUM_PROBES = 3
"""Runs of `flow` before the first round."""


def measure(options: argparse.Namespace, layers: float, modes: Sequence[str]) -> Record:
    """One round of the variants in `modes`."""
    path = make_job(options.job, options.out, layers)
    made = options.out / f"{options.job}.json"
    command = [sys.executable, "-m", "flowtrain.cli.main", "bench", str(path), "--modes", ",".join(modes)]
    command += ["--rounds", "1", "--steps", str(options.steps), "--warmup", str(options.warmup), "--json", str(made)]
    subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)
    record = as_record(options.job, json.loads(made.read_text(encoding="utf-8")), environment())
    record["settings"]["vision_layers"] = layers
    return record


def vision_layers(options: argparse.Namespace) -> float:
    """Layers of the vision tower, and a share of one, with which the loads are here what the job says: by the median of
    what runs of `flow` found a layer to be, since the pace of a machine moves."""
    layers: float = JOBS[options.job].size.vision_layers
    wanted = LOADS[JOBS[options.job].loads]
    found: list[float] = []
    for _ in range(NUM_PROBES):
        ratio = load_ratio(measure(options, layers, ["flow"]))
        print(f"{layers:g} vision layers: load of producers / consumers {ratio:.3f}", flush=True)
        found.append(ratio / layers)
        layers = round(wanted / median(found), 2)
    return layers


def compared(record: Record, baseline: Record, tolerance: float) -> list[Check]:
    """Ratios of flow, each at least that of the baseline less `tolerance`."""
    ours, theirs = by_other(record), by_other(baseline)
    found = [
        Check(f"flow / {name}", round(ours[name].median, 4), ">=", round(theirs[name].median * (1 - tolerance), 4))
        for name in ours
        if name in theirs
    ]
    bound = of_limit(baseline, "split bound").median * (1 - tolerance)
    return [
        *found,
        Check("flow / split bound", round(of_limit(record, "split bound").median, 4), ">=", round(bound, 4)),
    ]


def read_record(file: Path) -> Record:
    record: Record = json.loads(file.read_text(encoding="utf-8"))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes")
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--modes", help="default: those that the job is for")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of each run, warm-up included; default: the job's")
    parser.add_argument("--warmup", type=int, help="steps that are not measured; default: the job's")
    parser.add_argument("--out", type=Path, default=Path("runs/modes"), help="folder of the jobs and runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="put the rounds behind those of the file")
    parser.add_argument("--against", type=Path, help="an earlier record")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is not kept")
    options = parser.parse_args()
    job = JOBS[options.job]
    modes = (options.modes or MODES[job.loads]).split(",")
    options.steps = job.steps if options.steps is None else options.steps
    options.warmup = job.warmup if options.warmup is None else options.warmup
    record, baseline = None, None
    if options.add and options.json is not None and options.json.exists():
        record = read_record(options.json)
    if options.against is not None:
        baseline = read_record(options.against)
    like = record or baseline
    layers = vision_layers(options) if like is None else like["settings"]["vision_layers"]
    for _ in range(options.rounds):
        begin = 0 if record is None else len(record["limits"]) % len(modes)  # each round begins with another one
        made = measure(options, layers, (*modes[begin:], *modes[:begin]))
        record = made if record is None else joined(record, made)
        if options.json:
            found = [check.to_dict() for check in checks(record)]
            options.json.write_text(json.dumps({**record, "checks": found}, indent=1) + "\n", encoding="utf-8")
    assert record is not None, "one round at least"
    rows = [{"mode": name, "samples/s": rate.median, "spread": rate.spread} for name, rate in rates(record).items()]
    print(table(rows), f"load of producers / consumers: {load_ratio(record):.3f}", sep="\n\n")
    wanted = checks(record) if baseline is None else compared(record, baseline, options.tolerance)
    print(table([check.to_dict() for check in wanted]))
    if (options.check or options.against) and not all(check.ok for check in wanted):
        sys.exit(f"modes on {options.job}: not kept: {', '.join(check.name for check in wanted if not check.ok)}")


if __name__ == "__main__":
    main()
