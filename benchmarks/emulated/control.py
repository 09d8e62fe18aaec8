"""The control plane in figures: messages, bytes and time of the controller, over numbers of emulated devices."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from benchmarks.emulated.cases import FLOW, Bench
from benchmarks.record import Check
from flowtrain.emulate.executor import EmulatedExecutor
from flowtrain.emulate.meter import STEP_METHODS, Meter
from flowtrain.emulate.run import emulate, packs_of

NODES = (1, 2, 4, 8, 16)
STEPS = 6
CALLS = 3.0
"""Most control calls a pack and rank (C7)."""


def measure(bench: Bench, executor: EmulatedExecutor, nodes: int) -> dict[str, Any]:
    """As many rows a device and step as the case has on its own devices."""
    rows = bench.case.step_samples * nodes // bench.case.nodes
    case = replace(bench.case, nodes=nodes, step_samples=rows)
    folder = bench.folder / f"control-{nodes}"
    shutil.rmtree(folder, ignore_errors=True)
    of = replace(bench, case=case, folder=folder, _scale=None, _plans={})
    config, emulation = of.setup(FLOW, of.scale, "run", STEPS)
    weights = Meter(executor, sizes=True)
    emulate(config, emulation, executor, metered=weights)
    packs = packs_of(config.run.dir)
    shutil.rmtree(config.run.dir)
    meter = Meter(executor)
    emulate(config, emulation, executor, metered=meter)
    plan = emulation.plan(config)
    sent, answered = (
        sum(counted[method] for method in STEP_METHODS) for counted in (weights.order_bytes, weights.answer_bytes)
    )
    ranks = len(plan.producers.ranks) + len(plan.consumers.ranks)
    return {
        "case": "control",
        "variant": f"{emulation.num_devices} devices",
        "ranks": ranks,
        "consumers": plan.consumers.layout.dp_degree,
        "samples a step": rows,
        "packs a step": len(packs) / STEPS,
        "calls a step": meter.step_calls / STEPS,
        "calls a pack": meter.step_calls / len(packs),
        "calls a pack and rank": (meter.calls["train"] + meter.calls["encode"] + meter.calls["backward"])
        / (len(packs) * plan.consumers.layout.world_size / plan.consumers.layout.dp_degree),
        "bytes a step": (sent + answered) / STEPS,
        "bytes a pack": (sent + answered) / len(packs),
        "controller ms a step": 1e3 * meter.busy_seconds / STEPS,
        "controller ms a pack": 1e3 * meter.busy_seconds / len(packs),
        "controller CPU ms a pack": 1e3 * meter.cpu_seconds / len(packs),
    }


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """A pack costs as many calls, and the controller as much time, however many devices there are."""
    few, many = rows[0], rows[-1]
    return [
        Check("calls a pack and rank", max(row["calls a pack and rank"] for row in rows), "<=", CALLS),
        Check(
            f"controller CPU a pack, {many['variant']} / {few['variant']}",
            many["controller CPU ms a pack"] / few["controller CPU ms a pack"],
            "<=",
            2.0,
        ),
    ]
