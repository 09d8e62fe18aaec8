"""Text-heavy rows turn image-heavy half way: with `allocation.replan: auto` the run finds the producers it needs.

The number of producers never enters packs, so what the last steps would take with any other number is known: the
schedule of the same steps, simulated. The optimum is the best of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from benchmarks.emulated.cases import FLOW, Bench
from benchmarks.record import Check
from flowtrain.allocator.solve import Choice
from flowtrain.allocator.spare import with_producers
from flowtrain.config.schema import Config
from flowtrain.emulate.case import write_rows
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.executor import EmulatedExecutor
from flowtrain.emulate.modelled import Modelled
from flowtrain.emulate.run import Measured, emulate, packs_of
from flowtrain.simulator.planned import with_images
from flowtrain.types import Role

STEPS, TURN, LAST = 40, 12, 10
"""Of the run; before the images come; at the end, by which it is judged."""

STEP_SECONDS = 2.5
STEP_ROWS = 112
MOST_PRODUCERS = 6
FEW, MANY = 0.25, 1.6
"""Images before and after, as a multiple of the trace's."""

RECOVERY_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Drifting:
    """The run, and its schedule with any number of producers."""

    config: Config
    emulation: Emulation

    def modelled(self, producers: int | None = None) -> Modelled:
        plan = self.emulation.plan(self.config)
        if producers is not None:
            plan = with_producers(plan, producers)
        return Modelled(self.config, self.emulation, plan, self.config.run.dir)

    def last_seconds(self, producers: int) -> float:
        """Of a step among the last ones, by the schedule alone."""
        ends = [step.end for step in self.modelled(producers).play(STEPS).steps]
        return (ends[-1] - ends[-1 - LAST]) / LAST


def setup(bench: Bench) -> Drifting:
    """One producer, which text-heavy rows keep idle."""
    choices = bench.choices(FLOW)
    assert choices is not None
    one = tuple(_with_replicas(choice, 1) if choice.load.role is Role.PRODUCER else choice for choice in choices)
    folder = bench.folder / "drift"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = replace(bench.case, step_samples=STEP_ROWS)
    plain = case.rows()
    few = with_images(plain, FEW)[: (TURN + 3) * STEP_ROWS]
    many = [row for row in with_images(plain, MANY) if row.tokens <= case.pack_tokens]
    rows = write_rows((*few, *many), folder / "rows.jsonl")

    def of(scale: float) -> Drifting:
        emulation = case.emulation(one, time_scale=scale, jitter=bench.jitter, seed=bench.seed)
        replan = {"replan": "auto", "max_producers": MOST_PRODUCERS, "drift_window": 4}
        allocation = {"placement": FLOW.placement, **replan}
        data = {"train": rows, "shuffle": False}
        config = case.config(emulation, FLOW, rows, folder / "run", STEPS, allocation=allocation, data=data)
        return Drifting(config, emulation)

    return of(STEP_SECONDS / of(1.0).last_seconds(MOST_PRODUCERS))


def _with_replicas(choice: Choice, replicas: int) -> Choice:
    return replace(choice, candidate=replace(choice.candidate, dp_replicate=replicas))


def measure(bench: Bench, executor: EmulatedExecutor) -> dict[str, Any]:
    drifting = setup(bench)
    by_number = {number: drifting.last_seconds(number) for number in range(1, MOST_PRODUCERS + 1)}
    config = drifting.config
    emulate(config, drifting.emulation, executor)
    records = Measured.read(config.run.dir).records
    log = (config.run.dir / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    changes = [entry for entry in map(json.loads, log) if entry["kind"] == "replan"]
    steps = islice(drifting.modelled().steps(), STEPS)
    composed = [[sample.id for sample in pack.samples] for step in steps for pack in step.packs]
    optimum = min(by_number.values())
    measured = Measured(records).seconds(STEPS - LAST) / LAST
    return {
        "case": "drift",
        "variant": "replan auto",
        "producers": _numbers(changes),
        "modelled s by producers": {str(number): round(seconds, 4) for number, seconds in by_number.items()},
        "without s": by_number[1],
        "optimum s": optimum,
        "measured s": measured,
        "slower than the optimum %": 100.0 * (measured / optimum - 1.0),
        "same packs": sorted(composed) == sorted(pack["ids"] for pack in packs_of(config.run.dir)),
        "steps s": [round(record["time_metrics/end_to_end(s)"], 3) for record in records],
    }


def _numbers(changes: Sequence[dict[str, Any]]) -> str:
    return ", ".join(["1", *(f"{change['producers']} from step {change['step']}" for change in changes)])


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    (row,) = rows
    return [
        Check("drift: slower than the new optimum (%)", row["slower than the optimum %"], "<=", RECOVERY_PERCENT),
        Check("drift: packs as without a change", float(row["same packs"]), "==", 1.0),
        Check("drift: gain over the old plan", row["without s"] / row["measured s"], ">=", 1.1),
    ]
