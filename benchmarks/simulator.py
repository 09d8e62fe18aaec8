"""Can the simulator be believed, and how fast is it: `python -m benchmarks.simulator --json FILE --check`.

    a cycle:  calibration runs (even rows) ─▶ lines ─▶ simulated samples/s, on disk ─▶ judged runs (odd rows)

Real runs of `examples/emoji` on this machine. Calibration runs have one producer and one consumer, and loads of their
own (`CALIBRATION`; two producers where the sum of their gradients is to be known, `SUMS`); judged are other loads,
sizes of packs, exchanges and layouts (`JUDGED`) by samples/s of the middle step behind a warm-up, and nothing of them
is used before all predictions of the cycle are written. The pace of a shared machine drifts within minutes, so cycles
are short, each begins its judged runs with another one, and the cycle of median error counts. `drift %` is how much
longer than by the calibration the judged run's own packs took, and `without drift %` the error once that factor is
taken away: what is left is the simulator's own.

`--emulated FILE`: the rows of a record of `python -m benchmarks.emulated` are judged, too: what the simulator told for
them stands beside what was measured. That is not its proof, since both draw their waits from one model.

Then: seconds and memory of simulations of 1,024 and 16,384 devices, each in a process of its own, planning included.

The machine must have nothing else to do. `--speed` leaves the real runs out, `--runs` plays those only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.packing_fit import split
from benchmarks.record import Check, Result, main
from benchmarks.simulated import FROZEN, ROOT, case, public_model, question, scaling_samples
from benchmarks.simulator_lines import calibrate
from benchmarks.timed_runs import TimedRuns

CYCLES = 3
STEPS, SKIPPED = 10, 2

Keys = tuple[str, ...]


def keys(samples: int, tokens: int, *more: str) -> Keys:
    return (f"train.step={{samples: {samples}}}", f"packing.max_tokens={tokens}", *more)


FREEZE = {"trainable": (), "frozen": ("train.freeze=[encoder, projector]",)}
TWO = ("producers.num=2",)
ONE_PROCESS = ("mode=monolithic",)
CALIBRATION = (
    keys(32, 512, "pool.exchange=barrier_step"),
    keys(32, 1024),
    keys(32, 1536, "pool.exchange=barrier_step"),
)
SUMS: dict[str, tuple[Keys, ...]] = {"trainable": (keys(16, 512, *TWO),), "frozen": ()}
"""Calibration runs that only say how long two producers sum their gradients."""

JUDGED: dict[str, dict[str, Keys]] = {
    "trainable": {
        "1+1, 24 rows, packs of 768": keys(24, 768),
        "1+1, 40 rows, packs of 640, one slot ahead": keys(40, 640, "pool.exchange=barrier_pipeline"),
        "2+1, 32 rows, packs of 768": keys(32, 768, *TWO),
        "one process, 24 rows, packs of 896": keys(24, 896, *ONE_PROCESS),
    },
    "frozen": {
        "1+1, 40 rows, packs of 768": keys(40, 768),
        "2+1, 24 rows, packs of 640": keys(24, 640, *TWO),
        "one process, 40 rows, packs of 1280": keys(40, 1280, *ONE_PROCESS),
    },
}
MOST_ERROR, MOST_MEAN_ERROR, MOST_EMULATED_ERROR = 10.0, 5.0, 5.0
MIDDLE_SECONDS, LARGE_GIB = 60.0, 8.0


def cycle(runs: TimedRuns, even: Path, odd: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """Calibration, predictions, judged runs."""
    calibration = {
        freeze: [runs.prepare(even, (*own, *fixed), STEPS, seed) for own in (*CALIBRATION, *SUMS[freeze])]
        for freeze, fixed in FREEZE.items()
    }
    for run in chain.from_iterable(calibration.values()):
        runs.run(run)
    found = calibrate(calibration)
    to_come = {
        (freeze, name): runs.prepare(odd, (*own, *FREEZE[freeze]), STEPS, seed)
        for freeze, judged in JUDGED.items()
        for name, own in judged.items()
    }
    file = runs.folder / f"predicted-{number}.json"
    told = [(freeze, name, found[freeze].rate(run, SKIPPED)) for (freeze, name), run in to_come.items()]
    file.write_text(json.dumps(told), encoding="utf-8")
    # From here on the file is all that is used of the predictions.
    predictions = json.loads(file.read_text(encoding="utf-8"))
    first = number * len(predictions) // CYCLES
    rows = []
    for freeze, name, predicted in (*predictions[first:], *predictions[:first]):
        run = to_come[freeze, name]
        runs.run(run)
        measured, drift = run.rate(SKIPPED), found[freeze].drift(run)
        more = {
            "drift %": 100.0 * drift,
            "without drift %": 100.0 * (predicted / (1.0 + drift) / measured - 1.0),
            "together": found[freeze].cores.together,
            "message ms": 1000.0 * found[freeze].control.latency_seconds,
        }
        rows.append({"cycle": number, **compared(f"{freeze}, {name}", predicted, measured), **more})
    return rows


def compared(what: str, predicted: float, measured: float) -> dict[str, Any]:
    """A row of simulated and real samples/s."""
    error = 100.0 * (predicted / measured - 1.0)
    return {"what": what, "predicted samples/s": predicted, "measured samples/s": measured, "error %": error}


def emulated(record: Path) -> list[dict[str, Any]]:
    """Rows of the modes and ablations of every case, from a record of `benchmarks.emulated`."""
    measured = json.loads(record.read_text(encoding="utf-8"))["settings"]["measured"]
    return [
        compared(f"emulated: {row['case']}, {row['variant']}", row["samples/s"] * ratio, row["samples/s"])
        for row in measured
        if row["part"] == "grid" and "measured s" in row and (ratio := row["measured s"] / row["wait s"])
    ]


def judge(seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        even, odd = split(folder)
        with TimedRuns(folder) as runs:
            cycles = (cycle(runs, even, odd, number, CYCLES * seed + number) for number in range(CYCLES))
            return list(chain.from_iterable(cycles))


def errors(rows: Sequence[dict[str, Any]], column: str) -> dict[str, float]:
    """Of each judged run: the error of the cycle in which it is the middle one."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_name[row["what"]].append(abs(row[column]))
    return {name: median(values) for name, values in by_name.items()}


# --- speed ------------------------------------------------------------------------------------------------------------


def play(devices: int, steps: int) -> dict[str, Any]:
    """Seconds and memory of a simulation, in this process."""
    start = time.monotonic()
    of = case(question(public_model("qwen2.5-vl-72b"), devices, FROZEN, step_samples=scaling_samples(devices)))
    outcome = of.play(steps)
    return {
        "what": f"{devices} devices, {len(outcome.steps)} steps, {outcome.answers} answers",
        "predicted samples/s": outcome.figures()["samples_per_second"],
        "seconds": time.monotonic() - start,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def played(devices: int, steps: int) -> dict[str, Any]:
    """The same in a process of its own."""
    code = f"import json; from benchmarks.simulator import play; print(json.dumps(play({devices}, {steps})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, cwd=ROOT, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> Result:
    rows = [] if options.speed else judge(options.seed)
    checks = []
    if rows:
        found = errors(rows, "error %")
        checks += [Check(f"error of {name}, %", error, "<=", MOST_ERROR) for name, error in found.items()]
        checks.append(Check("mean error, %", fmean(found.values()), "<=", MOST_MEAN_ERROR))
    if options.emulated is not None:
        told = emulated(options.emulated)
        rows += told
        most = max(abs(row["error %"]) for row in told)
        checks.append(Check("largest error on emulated rows, %", most, "<=", MOST_EMULATED_ERROR))
    if not options.runs:
        middle, large = played(1024, 100), played(16384, 20)
        rows += [middle, large]
        checks.append(Check("seconds of 1,024 devices, 100 steps", middle["seconds"], "<=", MIDDLE_SECONDS))
        checks.append(Check("GiB of 16,384 devices, 20 steps", large["GiB"], "<=", LARGE_GIB))
    settings = {
        "steps": STEPS,
        "skipped": SKIPPED,
        "cycles": CYCLES,
        "calibration": CALIBRATION,
        "sums": SUMS,
        "judged": JUDGED,
    }
    columns = dict.fromkeys(column for row in rows for column in row)
    return Result(settings, [{column: row.get(column, "-") for column in columns} for row in rows], checks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--speed", action="store_true", help="leave the real runs out")
    only.add_argument("--runs", action="store_true", help="only the real runs")
    parser.add_argument("--emulated", type=Path, metavar="FILE", help="record of benchmarks.emulated, judged as well")
    main("simulator", measure, parser)
