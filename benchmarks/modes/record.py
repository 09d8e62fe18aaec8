"""Records of the modes on one job: rounds of several calls put together, and the limits of their ratios.

flowtrain bench --json ──▶ round ─┐
record of earlier rounds ─────────┴─▶ record ──▶ benchmarks/baselines/JOB.json ──▶ docs/performance.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import Check
from flowtrain.cli.bench_result import RATE, Spread, ratios, spread_of, summarize
from flowtrain.telemetry import metrics as m

Record = dict[str, Any]

BY_ROUND = ("runs", "schedule / measured", "telemetry")
"""By variant, a value a round."""


def as_record(job: str, bench: Mapping[str, Any], environment: Mapping[str, Any]) -> Record:
    """A record of what one `flowtrain bench` of one round wrote."""
    return {
        "benchmark": "modes",
        "job": job,
        **environment,
        "settings": {**bench["settings"], "config": Path(bench["settings"]["config"]).name},
        "runs": bench["runs"],
        "limits": [bench["limits"]],
        "schedule / measured": {name: [value["median"]] for name, value in bench["schedule / measured"].items()},
        "telemetry": {name: [share] for name, share in bench["telemetry"].items()},
        "losses": bench["losses"],
        "loads": [bench["loads"]],
    }


def joined(before: Record, new: Record) -> Record:
    """Both, in the order of the first one; machine and settings are those of the newer one, which must be of the same
    job and variants."""
    assert before["job"] == new["job"], f"{before['job']} and {new['job']}"
    assert before["runs"].keys() == new["runs"].keys(), f"{[*before['runs']]} and {[*new['runs']]}"
    both = {key: {name: [*values, *new[key][name]] for name, values in before[key].items()} for key in BY_ROUND}
    return {**new, **both, **{key: [*before[key], *new[key]] for key in ("limits", "loads")}}


def rates(record: Record) -> dict[str, Spread]:
    return {name: summarize(runs)[RATE] for name, runs in record["runs"].items()}


def by_other(record: Record) -> dict[str, Spread]:
    """flow by every other variant."""
    return ratios(record["runs"], "flow")


def of_limit(record: Record, name: str) -> Spread:
    """flow by a limit of the same round."""
    pairs = zip(record["runs"]["flow"], record["limits"], strict=True)
    return spread_of([run[RATE] / limit[name] for run, limit in pairs])


def load_ratio(record: Record) -> float:
    """Device-seconds of the producer modules by those of the consumers'."""
    return spread_of([loads["producer"] / loads["consumer"] for loads in record["loads"]]).median


def checks(record: Record) -> list[Check]:
    """What the ratios should be at least; a job is frozen or trainable by its name."""
    frozen, even = "frozen" in record["job"], "uneven" not in record["job"]
    by = {name: value.median for name, value in by_other(record).items()}
    found: list[Check] = []

    def at_least(name: str, value: float | None, limit: float) -> None:
        if value is not None:
            found.append(Check(name, round(value, 4), ">=", limit))

    def at_most(name: str, value: float | None, limit: float) -> None:
        if value is not None:
            found.append(Check(name, round(value, 4), "<=", limit))

    if even:
        at_most("loads: off from equal", abs(1 - load_ratio(record)), 0.05)
        at_least("flow / split bound", of_limit(record, "split bound").median, 0.92 if frozen else 0.85)
        at_least("flow / disaggregated", by.get("disaggregated"), 1.05 if frozen else 1.0)
        at_least("flow / barrier_step", by.get("barrier_step") if frozen else None, 1.5)
        at_least("flow / monolithic", by.get("monolithic"), 1.05)
        at_least("flow / monolithic_dynamic", by.get("monolithic_dynamic"), 0.95 if frozen else 0.9)
    if not even and "auto" in record["runs"]:
        auto = ratios(record["runs"], "auto")
        at_least("auto / best of the others", min(value.median for value in auto.values()), 0.98)
    if even and frozen:
        gap = [run[m.MFU_GAP.name] for run in record["runs"]["flow"]]
        at_most("gap to LLM-only (%)", spread_of(gap).median, 3)
        starved = [100 * share for share in _starved(record["runs"]["flow"], record["settings"])]
        at_most("starvation (% of the step)", spread_of(starved).median, 2)
    for name, values in record["schedule / measured"].items():
        if name != "flow":
            at_most(f"{name}: step off its schedule", abs(1 - spread_of(values).median), 0.03)
    shares = [share for values in record["telemetry"].values() for share in values if share is not None]
    at_most("telemetry (% of the run)", 100 * max(shares), 1) if shares else None
    return found


def _starved(runs: Iterable[Mapping[str, float]], settings: Mapping[str, Any]) -> Iterable[float]:
    """Starvation as a share of the step, which has `step_rows` rows."""
    return [run[m.STARVATION.name] * run[RATE] / settings["step_rows"] for run in runs]
