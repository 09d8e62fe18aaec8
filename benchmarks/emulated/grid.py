"""All modes and ablations of every case, measured on emulated devices beside what their schedules alone take."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.emulated.cases import NAMES, SKIPPED, STEPS, Bench
from benchmarks.record import Check
from flowtrain.emulate.emulation import choices_text
from flowtrain.emulate.executor import EmulatedExecutor
from flowtrain.emulate.modelled import Modelled
from flowtrain.emulate.run import Measured, emulate, packs_of

OVERHEAD_PERCENT = 2.0
GAINS = (("monolithic", 1.3), ("disaggregated", 1.08))
"""By how much `flow` is to be faster, where the model says that it can be."""

CLEAR = 1.02
"""A ratio counts as possible where the model has this much more than the limit."""


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the grid."""

    case: str
    name: str

    def measure(self, bench: Bench, executor: EmulatedExecutor) -> dict[str, Any]:
        """Run it; figures are of the steps behind the first `SKIPPED`."""
        variant = bench.variant(self.name)
        if variant is None:
            return {"case": self.case, "variant": self.name, "note": "no plan fits"}
        config, emulation = bench.setup(variant, bench.scale, self.name)
        shutil.rmtree(config.run.dir, ignore_errors=True)
        modelled = Modelled(config, emulation, emulation.plan(config), config.run.dir)
        outcome = modelled.play(STEPS)
        expected = bench.step_seconds(outcome)
        emulate(config, emulation, executor)
        measured = Measured.read(config.run.dir).seconds(SKIPPED) / (STEPS - SKIPPED)
        steps = islice(modelled.steps(), STEPS)
        composed = [[sample.id for sample in pack.samples] for step in steps for pack in step.packs]
        trained = [pack["ids"] for pack in packs_of(config.run.dir)]
        assert sorted(composed) == sorted(trained), "the run has trained other packs than those that were modelled"
        ranks = "+".join(str(len(side.ranks)) for side in (modelled.plan.producers, modelled.plan.consumers))
        return {
            "case": self.case,
            "variant": self.name,
            "policy": variant.policy,
            "packing": variant.composition,
            "plan": choices_text(emulation.choices),
            "devices": emulation.num_devices,
            "ranks": ranks,
            "processes": len(executor.pids),
            "time scale": emulation.time_scale,
            "modelled s": expected / emulation.time_scale,
            "wait s": expected,
            "measured s": measured,
            "overhead %": 100.0 * (measured / expected - 1.0),
            "starvation %": outcome.figures()["starvation_percent"],
            "samples/s": bench.case.step_samples * emulation.time_scale / measured,
        }


def runs(cases: Iterable[str], names: Sequence[str] = NAMES) -> list[Run]:
    return [Run(case, name) for case in cases for name in names]


def checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Overhead of every run; gains of `flow` where the model says that they are possible."""
    found = [row for row in rows if "measured s" in row]
    result = [
        Check(f"overhead of {row['variant']}, {row['case']} (%)", row["overhead %"], "<=", OVERHEAD_PERCENT)
        for row in found
    ]
    by_name = {(row["case"], row["variant"]): row for row in found}
    for (case, name), flow in by_name.items():
        if name != "flow":
            continue
        for other, limit in ((of + end, limit) for of, limit in GAINS for end in ("", "_best")):
            baseline = by_name.get((case, other))
            if baseline is not None and baseline["modelled s"] / flow["modelled s"] >= limit * CLEAR:
                gain = baseline["measured s"] / flow["measured s"]
                result.append(Check(f"flow / {other}, {case}", gain, ">=", limit))
    return result


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster `flow` is than each other variant: measured, and by the model."""
    found = {(row["case"], row["variant"]): row for row in rows if "measured s" in row}
    table = []
    for case in dict.fromkeys(case for case, _ in found):
        if (case, "flow") not in found:
            continue
        flow, line = found[case, "flow"], {"case": case}
        for name in NAMES[1:]:
            other = found.get((case, name))
            if other is None:
                line[f"flow / {name}"] = "–"
            else:
                measured, modelled = (other[key] / flow[key] for key in ("measured s", "modelled s"))
                line[f"flow / {name}"] = f"{measured:.2f} ({modelled:.2f})"
        table.append(line)
    return table
