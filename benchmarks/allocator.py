"""The allocator: exact on random problems, fast on large clusters, never below simpler policies, plans for real models.

| part | what |
|---|---|
| `exact` | random problems against brute force (tests/unit/allocator/brute_force.py): rate and devices |
| `speed` | 16,384 devices of one kind and of three, enumeration included, on one core |
| `policies` | `flow_matching` over `flops_proportional` and `uniform` |
| `laws` | no communication: the analytic optimum; more of anything is not slower; half the speed is half the rate |
| `plans` | `flowtrain plan` for every model of `examples/plans` on 8 to 1,024 H100 |

    python -m benchmarks.allocator --json FILE [--check] [--trace FILE] [--plans DIR] [--instances N]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.allocator_instances import random_problem
from benchmarks.record import Check, Result, main
from flowtrain.allocator.candidates import WHOLE
from flowtrain.allocator.explain import explain
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import HARDWARE, Cluster, NodePool, NodeType
from flowtrain.allocator.load import Candidate, CandidateTable
from flowtrain.allocator.policies import POLICIES, flow_matching
from flowtrain.allocator.problem import Question
from flowtrain.allocator.search import search
from flowtrain.allocator.solve import ANYWHERE, Problem
from flowtrain.allocator.stats import read_stats
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.types import Module

ROOT = Path(__file__).resolve().parent.parent
BRUTE_FORCE = ROOT / "tests/unit/allocator/brute_force.py"
APART = frozenset({"disaggregated"})
DEVICES = (8, 64, 256, 1024)
LARGE = 16_384
MODEL_7B = ("qwen2_5_vl", 3584)
"""`model_type` and hidden size of the model of the checks that name one."""


@dataclass(slots=True)
class Found:
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def add(self, part: str, case: str, value: float, unit: str) -> None:
        self.rows.append({"part": part, "case": case, "value": value, "unit": unit})

    def check(self, name: str, value: float, op: str, limit: float) -> None:
        self.checks.append(Check(name, value, op, limit))


@dataclass(frozen=True, slots=True)
class Options:
    trace: Path
    plans: Path
    instances: int


def brute_force() -> ModuleType:
    spec = importlib.util.spec_from_file_location("brute_force", BRUTE_FORCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bytes_of(load: Any, candidates: list[dict[str, int]], job: Any) -> Sequence[float]:
    """The memory model, asked for a list."""
    if not candidates:
        return []
    used = device_bytes(load, CandidateTable.of([Candidate(**candidate) for candidate in candidates]), job)
    return [float(size) for size in np.broadcast_to(used, len(candidates))]


def exact(found: Found, seed: int, num: int) -> None:
    """At least `num` problems compared; two thirds over all configurations, the others over Pareto points."""
    brute = brute_force()
    for name, most, pareto, share in (("all configurations", 16, False, 2 / 3), ("Pareto points", 64, True, 1 / 3)):
        compared = mismatches = infeasible = 0
        modules: dict[int, int] = {}
        at = seed * 1_000_000 + most * 10_000
        while compared < math.ceil(num * share):
            problem = random_problem(at, most)
            at += 1
            mine = search(problem, device_bytes)
            try:
                best = brute.best_of_all(
                    problem.loads, problem.cluster, problem.job, bytes_of, problem.placements, pareto
                )
            except OverflowError:  # too many combinations to try: another problem is drawn
                continue
            compared += 1
            modules[len(problem.loads)] = modules.get(len(problem.loads), 0) + 1
            if mine is None or best is None:
                infeasible += 1
                mismatches += (mine is None) != (best is None)
            else:
                mismatches += abs(mine.rate / best[0] - 1) > 1e-8 or mine.devices != best[1]
        found.add("exact", f"{name}, up to {most} devices", compared, "problems")
        found.add("exact", f"{name}, infeasible in both", infeasible, "problems")
        found.add("exact", f"{name}, with 3 or 4 modules", sum(modules.get(n, 0) for n in (3, 4)), "problems")
        found.check(f"mismatches, {name}", mismatches, "==", 0)
    compared = sum(row["value"] for row in found.rows if row["case"].endswith("devices"))
    found.check("problems compared", compared, ">=", num)


def cluster(*names: str, devices: int) -> Cluster:
    return tuple(NodePool(HARDWARE[name], max(1, devices // HARDWARE[name].devices // len(names))) for name in names)


def question(shape: ModelShape, options: Options, of: Cluster, *frozen: Module, placements: Any = ANYWHERE) -> Question:
    return Question(shape, read_stats(options.trace), frozenset(frozen), of, placements=placements)


def speed(found: Found, shape: ModelShape, options: Options) -> None:
    for kinds, limit in ((("h100",), 1.0), (("h100", "a100", "h200"), 10.0)):
        problem = question(shape, options, cluster(*kinds, devices=LARGE)).problem()
        seconds = min(_timed(problem) for _ in range(3))
        case = f"{LARGE} devices of {len(kinds)} kind{'s' if len(kinds) > 1 else ''}"
        found.add("speed", case, seconds, "s")
        found.check(f"solve, {case}", seconds, "<=", limit)


def _timed(problem: Problem) -> float:
    start = time.perf_counter()
    assert search(problem, device_bytes) is not None
    return time.perf_counter() - start


def policies(found: Found, seed: int, shapes: Mapping[str, ModelShape], seven: ModelShape, options: Options) -> None:
    """Worst ratio of `flow_matching` to each simpler policy, over random problems and over real models."""
    worst = dict.fromkeys(("uniform", "flops_proportional", "stage_balanced"), math.inf)
    problems = [random_problem(seed * 1_000_000 + 5_000_000 + n, 48) for n in range(150)]
    for shape in shapes.values():
        problems += [question(shape, options, cluster("h100", devices=n), placements=APART).problem() for n in (8, 64)]
    for problem in problems:
        best = flow_matching(problem, device_bytes, WHOLE)
        for name in worst:
            other = POLICIES[name](problem, device_bytes, WHOLE)
            if other is not None:
                assert best is not None
                worst[name] = min(worst[name], best.rate / other.rate)
    for name, ratio in worst.items():
        found.add("policies", f"least of flow_matching / {name}", ratio, "ratio")
        found.check(f"flow_matching / {name}, least", ratio, ">=", 1 - 1e-9)
    small = question(seven, options, cluster("h100", devices=8), placements=APART).problem()
    rates = {name: policy(small, device_bytes, WHOLE) for name, policy in POLICIES.items()}
    best, proportional = rates["flow_matching"], rates["flops_proportional"]
    assert best is not None
    assert proportional is not None
    for name, plan in rates.items():
        if plan is not None:
            found.add("policies", f"7B, trainable encoder, 8 H100: {name}", plan.rate, "samples/s")
    found.check("gain over flops_proportional, 7B on 8 H100", best.rate / proportional.rate, ">=", 1.10)


def laws(found: Found, seed: int) -> None:
    slower = doubled = 0.0
    for n in range(100):
        problem = random_problem(seed * 1_000_000 + 7_000_000 + n, 16)
        best = search(problem, device_bytes)
        if best is None:
            continue
        for change in (_scaled(memory_bytes=1.5), _scaled(link_bandwidth=2, network_bandwidth=2, memory_bandwidth=2)):
            slower = max(slower, 1 - _rate(replace(problem, cluster=tuple(map(change, problem.cluster)))) / best.rate)
        more = tuple(replace(pool, num_nodes=pool.num_nodes + 1) for pool in problem.cluster)
        slower = max(slower, 1 - _rate(replace(problem, cluster=more)) / best.rate)
        half = tuple(map(_half_speed, problem.cluster))
        doubled = max(doubled, abs(2 * _rate(replace(problem, cluster=half)) / best.rate - 1))
    found.add("laws", "largest loss from more devices, memory or bandwidth", slower, "share")
    found.check("more is never slower, largest loss", slower, "<=", 1e-9)
    found.add("laws", "half the speed of everything: distance from half the rate", doubled, "share")
    found.check("doubling all work halves the rate, largest error", doubled, "<=", 1e-9)
    short = max(_short_of_optimum(random_problem(seed * 1_000_000 + 8_000_000 + n, 8, 2)) for n in range(20))
    found.add("laws", "no communication, 256 devices: short of the analytic optimum", short, "share")
    found.check("no communication: short of the analytic optimum", short, "<=", 2 / 256 + 1e-3)


def _scaled(**factors: float) -> Any:
    def change(pool: NodePool) -> NodePool:
        figures = {name: getattr(pool.node, name) * factor for name, factor in factors.items()}
        return replace(pool, node=replace(pool.node, **figures))

    return change


def _half_speed(pool: NodePool) -> NodePool:
    node = pool.node
    half: NodeType = replace(
        node,
        peak_flops={dtype: peak / 2 for dtype, peak in node.peak_flops.items()},
        memory_bandwidth=node.memory_bandwidth / 2,
        link_bandwidth=node.link_bandwidth / 2,
        network_bandwidth=node.network_bandwidth / 2,
        latency_seconds=node.latency_seconds * 2,
    )
    return replace(pool, node=half)


def _rate(problem: Problem) -> float:
    best = search(problem, device_bytes)
    return best.rate if best else 0.0


def _short_of_optimum(problem: Problem) -> float:
    """Share of the analytic optimum that is missed when nothing but arithmetic takes time and memory never binds."""
    node = problem.cluster[0].node
    free = replace(
        node,
        devices=8,
        link_bandwidth=math.inf,
        network_bandwidth=math.inf,
        memory_bandwidth=math.inf,
        latency_seconds=0.0,
        memory_bytes=1e15,
        efficiency=replace(node.efficiency, half_rows=0.0),
    )
    job = replace(problem.job, step_samples=1_000_000, imbalance=1.0, unit_imbalance=1.0, headroom=0.0)
    loads = tuple(replace(load, spread=0.0) for load in problem.loads)
    placed = replace(problem, loads=loads, cluster=(NodePool(free, 32),), job=job, placements=APART)
    eta = free.efficiency
    seconds = sum(
        load.linear_passes * (load.linear_flops + load.outer_flops) / eta.gemm
        + load.attention_passes * load.attention_flops / eta.attention
        for load in loads
    )
    return 1 - _rate(placed) * seconds / free.peak(job.dtype) / 256


def matched(found: Found, shapes: Mapping[str, ModelShape], options: Options) -> None:
    """Slowest over fastest module, or the proof that no neighbour is better: each was solved for, and is slower."""
    unproved = 0
    for name, shape in shapes.items():
        for devices in DEVICES[1:]:
            problem = question(shape, options, cluster("h100", devices=devices), placements=APART).problem()
            best = search(problem, device_bytes)
            if best is None:
                continue
            ratio = min(best.group_seconds) / max(best.group_seconds)
            found.add("matched", f"{name}, {devices} H100: slowest / fastest module", ratio, "ratio")
            if ratio < 0.95:
                why = explain(problem, device_bytes, best, WHOLE, {})
                unproved += not why.neighbours or any(other.rate > best.rate for other in why.neighbours)
    found.check("rates apart by more than 5 % with a better neighbour", unproved, "==", 0)


def plans(found: Found, shapes: Mapping[str, ModelShape], options: Options) -> None:
    """The command itself, in a process of its own."""
    slowest, busiest, made = 0.0, 0.0, 0
    for name in shapes:
        for devices in DEVICES:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds, plan = _planned(options.plans / name, devices, options.trace)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            slowest = max(slowest, seconds)
            busiest = max(busiest, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            made += plan is not None
            if plan is not None:
                layouts = ", ".join(f"{module} {m['layout']}" for module, m in plan["modules"].items())
                case = f"{name}, {devices} H100: {plan['placement']}, {layouts}"
                found.add("plans", case, plan["samples_per_second"], "samples/s")
                found.add("plans", f"{name}, {devices} H100: MFU", plan["mfu_percent"], "%")
            else:
                found.add("plans", f"{name}, {devices} H100: refused, does not fit", seconds, "s")
    found.add("plans", "slowest command", slowest, "s")
    found.add("plans", "most processor time of a command", busiest, "s")
    # Of the processor: on a machine with other work the clock measures that work.
    found.check("flowtrain plan, most processor seconds", busiest, "<", 2.0)
    found.check("flowtrain plan, answered (a plan, or what would fit)", made, ">=", len(shapes) * (len(DEVICES) - 1))


def _planned(model: Path, devices: int, trace: Path) -> tuple[float, dict[str, Any] | None]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "flowtrain.cli.main", "plan", str(model), "--device", "h100"]
        command += ["--nodes", str(devices // 8), "--data", str(trace), "--json", str(out)]
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False
        )
        seconds = time.perf_counter() - start
        if done.returncode == 4:
            return seconds, None
        assert done.returncode == 0, done.stderr
        return seconds, json.loads(out.read_text(encoding="utf-8"))


def models(folder: Path) -> Iterator[tuple[str, ModelShape]]:
    for file in sorted(folder.glob("*/config.json")):
        yield file.parent.name, read_shape(file.parent)


def measure(seed: int, options: Options) -> Result:
    found = Found()
    shapes = dict(models(options.plans))
    seven = next(shape for shape in shapes.values() if (shape.family, shape.text.hidden) == MODEL_7B)
    exact(found, seed, options.instances)
    speed(found, seven, options)
    policies(found, seed, shapes, seven, options)
    laws(found, seed)
    matched(found, shapes, options)
    plans(found, shapes, options)
    settings = {"trace": options.trace.name, "models": list(shapes), "devices": list(DEVICES), "tie": 1e-9}
    return Result(settings, found.rows, found.checks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "benchmarks/traces/mix_sft_8k.parquet", help="sizes of rows"
    )
    parser.add_argument("--plans", type=Path, default=ROOT / "examples/plans", help="folder of model folders")
    parser.add_argument("--instances", type=int, default=1200, help="random problems for the exact search")
    main(
        "allocator",
        lambda given: measure(given.seed, Options(given.trace.resolve(), given.plans.resolve(), given.instances)),
        parser,
    )
