"""Can the simulator be believed, and how fast is it: `python -m benchmarks.simulator --json FILE --check`.

    calibration runs ─▶ seconds of every order ─▶ lines ─▶ CostTiming ─▶ predictions, on disk
                                                                              ⇕
                                                                         judged runs

Real runs of `examples/emoji` on this machine. For each layout a run of even rows gives the seconds of encodes,
backwards and packs, as lines in what they hold, and those of the ends of steps. Judged are runs of odd rows with other
sizes of packs and another exchange, by samples/s of the steady steps; nothing of them is used before all predictions
are written. Processes on too few cores slow one another down, which the lines of a layout hold and those of another do
not.

The machine must have nothing else to do. `--speed` leaves these runs out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from benchmarks.record import Check, Result, main
from benchmarks.simulated import FROZEN, ROOT, case, public_model, question
from flowtrain.allocator import local_inventory, make_plan
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.data.order import Order
from flowtrain.packing import CostModel
from flowtrain.packing.fit import LineFit
from flowtrain.packing.trace import composed_steps, endless
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.runtime.inputs import Inputs, composition, open_rows
from flowtrain.shapes import read_shape
from flowtrain.simulator import Control, Simulation, System
from flowtrain.simulator.timing import CostTiming
from flowtrain.sizes import read_sizes, sizes_file
from flowtrain.types import Role, SampleMeta

EXAMPLE = ROOT / "examples/emoji/emoji.yaml"
STEPS, SKIPPED = 14, 4
WARM_UP = 4
"""Calls of each kind that no line is fitted to."""

FROZEN_KEYS = ("train.freeze=[encoder, projector]",)
LAYOUTS = {
    "1+1": ("producers.num=1", "consumers.num=1"),
    "1+1 frozen": ("producers.num=1", "consumers.num=1", *FROZEN_KEYS),
    "2+1": ("producers.num=2", "consumers.num=1", "cluster.oversubscribe=true"),
    "colocated": ("mode=monolithic",),
}
CALIBRATION = ("packing.max_tokens=1024",)
SMALLER = ("packing.max_tokens=640",)
JUDGED = (
    ("1+1", SMALLER),
    ("1+1", (*SMALLER, "pool.exchange=barrier_step")),
    ("1+1 frozen", SMALLER),
    ("2+1", SMALLER),
    ("colocated", SMALLER),
)
MOST_ERROR, MOST_MEAN_ERROR = 10.0, 5.0


# --- real runs --------------------------------------------------------------------------------------------------------


def split(folder: Path) -> tuple[Path, Path]:
    """Files of the even and of the odd rows, and the sizes of their rows beside them."""
    source = load_config(EXAMPLE).config.data.train
    paths = folder / "even.jsonl", folder / "odd.jsonl"
    rows: tuple[list[str], list[str]] = ([], [])
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        row["images"] = [str(source.parent / image) for image in row.get("images") or []]
        rows[number % 2].append(json.dumps(row))
    for path, lines in zip(paths, rows, strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "flowtrain.cli.main",
            "data",
            "scan",
            str(EXAMPLE),
            "--set",
            f"data.train={path}",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return paths


def config_of(folder: Path, name: str, data: Path, keys: Sequence[str], seed: int) -> Config:
    fixed = {
        "run.dir": folder / name,
        "run.seed": seed,
        "data.train": data,
        "data.eval": "null",
        "train.max_steps": STEPS,
        "checkpoint.export": "false",
        "telemetry.progress": "off",
    }
    return load_config(EXAMPLE, [*(f"{key}={value}" for key, value in fixed.items()), *keys]).config


def run(config: Config) -> Mapping[str, Any]:
    """What `timed_run` says of this run, in a process of its own."""
    from flowtrain.config.loading import config_to_json

    folder = config.run.dir
    folder.mkdir(parents=True)
    file, out = folder / "config.yaml", folder / "calls.json"
    file.write_text(yaml.safe_dump(json.loads(config_to_json(config))), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.timed_run", str(file), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def measured_rate(config: Config) -> float:
    """Rows a second of the steady steps."""
    lines = (config.run.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steady = [record for record in map(json.loads, lines) if record["step"] > SKIPPED]
    return float(sum(r["rows"] for r in steady) / sum(r["time_metrics/end_to_end(s)"] for r in steady))


# --- predictions ------------------------------------------------------------------------------------------------------


def line(calls: Sequence[Any], prior: Sequence[float]) -> Sequence[float]:
    fit = LineFit(prior)
    for features, seconds in calls[WARM_UP:]:
        fit.add(features, seconds)
    found = fit.solve()
    assert found is not None, f"{len(calls)} calls are too few for a line"
    return found.usable


def timing_of(told: Mapping[str, Any], base: CostModel, colocated: bool) -> CostTiming:
    """Lines of a calibration run; what one process does between the stages is a part of its packs."""
    calls, real = told["calls"], base.coefficients()
    geometry = {name: getattr(base, name) for name in ("full_layers", "windowed_layers", "window_tokens")}
    producer = ("patch", "patch_pair", "unit")
    consumer = ("token", "token_pair", "trained_token", "projected_patch", "pack")

    def model(kind: str, names: Sequence[str], more: float = 0.0) -> CostModel:
        found = dict(zip(names, line(calls[kind], [real[name] for name in names]), strict=True))
        if more:
            found["pack"] += more
        return CostModel.from_coefficients(**{"token": 0.0, **found}, **geometry)

    between = told["between_seconds"] / len(calls["pack"]) if colocated else 0.0
    ends: dict[str, dict[Role, float]] = {"reduce": {}, "update": {}}
    for method, of_role in ends.items():
        for role in (Role.PRODUCER, Role.CONSUMER):
            seconds = [seconds for _, seconds in calls.get(f"{method} {role}", ())][1:]
            if seconds:
                of_role[role] = median(seconds)
    backward = model("backward", producer) if calls.get("backward") else None
    return CostTiming(
        model("encode", producer), backward, model("pack", consumer, between), ends["reduce"], ends["update"]
    )


def rows_of(config: Config) -> list[SampleMeta]:
    """In the run's order."""
    pairs = read_shape(config.model.path).vision.attended_pairs
    known = read_sizes(sizes_file(config.data.train), pairs=pairs)
    order = Order(len(known), config.run.seed, config.data.shuffle)
    rows = [known[order.row(position)] for position in range(len(known))]
    return [row._replace(position=position) for position, row in enumerate(rows) if row is not None]


def predicted_rate(config: Config, timing: CostTiming) -> float:
    """Rows a second of the steady steps, simulated."""
    shape = read_shape(config.model.path)
    plan = make_plan(config, shape, local_inventory())
    inputs = Inputs(config, config.run.dir, shape, plan, open_rows(config.data.train), None, None, None, None)
    spec = replace(composition(inputs), horizon=None)
    colocated = plan.placement == "colocated"
    producers, consumers = plan.producers.leading, plan.consumers.leading
    system = System(
        num_producers=len(producers),
        num_consumers=len(consumers),
        num_devices=len(consumers) if colocated else len(producers) + len(consumers),
        segment_bytes=min(rank.segment_bytes for rank in producers),
        payload_bytes=inputs.sample_bytes,
        trainable_encoder=config.trainable_encoder,
        reduced_roles=inputs.reduced_roles,
        exchange=EXCHANGES[config.exchange],
        colocated=colocated,
        control=Control(0.0, 0.0) if colocated else Control(),
    )
    cost = CostModel.from_shape(shape, config.frozen, config.cut)
    outcome = Simulation(system, timing, composed_steps(spec, cost, endless(rows_of(config)))).run(STEPS)
    steady = outcome.steps[SKIPPED:]
    return sum(step.rows for step in steady) / (steady[-1].end - outcome.steps[SKIPPED - 1].end)


def believed(seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        even, odd = split(folder)
        timings = {}
        for layout, keys in LAYOUTS.items():
            config = config_of(folder, f"calibration-{layout}", even, (*keys, *CALIBRATION), seed)
            base = CostModel.from_shape(read_shape(config.model.path), config.frozen, config.cut)
            timings[layout] = timing_of(run(config), base, layout == "colocated")
        configs = [
            config_of(folder, f"judged-{number}", odd, (*LAYOUTS[layout], *keys), seed)
            for number, (layout, keys) in enumerate(JUDGED)
        ]
        predictions = [
            predicted_rate(config, timings[layout]) for config, (layout, _) in zip(configs, JUDGED, strict=True)
        ]
        file = folder / "predicted.json"
        file.write_text(json.dumps(predictions), encoding="utf-8")
        for config in configs:
            run(config)
        # The file is all that is used of the predictions.
        rows = []
        for config, (layout, keys), rate in zip(configs, JUDGED, json.loads(file.read_text()), strict=True):
            measured = measured_rate(config)
            error = 100.0 * (rate / measured - 1.0)
            rows.append(_row(f"{layout}, {', '.join(keys)}", rate, measured, error, "-", "-"))
        return rows


def _row(what: str, predicted: Any, measured: Any, error: Any, seconds: Any, gigabytes: Any) -> dict[str, Any]:
    return {
        "what": what,
        "predicted samples/s": predicted,
        "measured samples/s": measured,
        "error %": error,
        "seconds": seconds,
        "GiB": gigabytes,
    }


# --- speed ------------------------------------------------------------------------------------------------------------


def play(devices: int, steps: int) -> dict[str, Any]:
    """Seconds and memory of a simulation, planning included; in a process of its own."""
    start = time.monotonic()
    of = case(question(public_model("qwen2.5-vl-72b"), devices, FROZEN, step_samples=devices * 4))
    outcome = of.play(steps)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rate = outcome.figures()["samples_per_second"]
    name = f"{devices} devices, {len(outcome.steps)} steps, {outcome.answers} answers"
    return _row(name, rate, "-", "-", time.monotonic() - start, gigabytes)


def played(devices: int, steps: int) -> dict[str, Any]:
    code = f"import json; from benchmarks.simulator import play; print(json.dumps(play({devices}, {steps})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, cwd=ROOT, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> Result:
    real = [] if options.speed else believed(options.seed)
    middle, large = played(1024, 100), played(16384, 20)
    checks = [Check(f"error of {row['what']}, %", abs(row["error %"]), "<=", MOST_ERROR) for row in real]
    if real:
        checks.append(Check("mean error, %", fmean(abs(row["error %"]) for row in real), "<=", MOST_MEAN_ERROR))
    checks.append(Check("seconds of 1,024 devices, 100 steps", middle["seconds"], "<=", 60.0))
    checks.append(Check("GiB of 16,384 devices, 20 steps", large["GiB"], "<=", 8.0))
    settings = {"steps": STEPS, "skipped": SKIPPED, "calibration": CALIBRATION, "layouts": LAYOUTS}
    return Result(settings, [*real, middle, large], checks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", action="store_true", help="leave the real runs out")
    main("simulator", measure, parser)
