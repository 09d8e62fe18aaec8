"""What `flowtrain bench` makes of the runs of its variants: medians, spreads, limits (pure).

    metrics.jsonl of each run ──measure──▶ figures of a run ──summarize, ratios──▶ median and spread of a variant
    trace of one run          ──limits───▶ what the machine could do at best

| limit | rate in samples/s |
|---|---|
| `ideal` | rows by the modules' own device-seconds, every device busy with nothing else |
| `split bound` | the same where each side has its own devices: the one with the larger load a device decides |
| `LLM-only` | consumers fed with ready features: a run without the consumers' waiting for the encoder |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.losses import DEVICE_SIDES, MODEL_WORK, Breakdown
from flowtrain.telemetry.registry import Reduce, Tally

RATE = "samples/s"

FIGURES = (
    m.THROUGHPUT,
    m.MFU,
    m.MFU_ENCODER,
    m.MFU_BACKBONE,
    m.MFU_LLM_ONLY,
    m.MFU_GAP,
    m.STARVATION,
    m.STALL,
    m.PACK_IMBALANCE_MEASURED,
    m.PACK_FILL,
)
"""Of the table of metrics, each over the steps measured."""

SECONDS_A_STEP = {m.STARVATION, m.STALL}
"""Reduced to a mean over the steps, where the table has sums."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the runs of one variant: the middle one, and largest minus smallest by the middle."""

    median: float
    spread: float


def measure(records: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, float]:
    """Figures of one run by its metrics.jsonl, the first `warmup` steps left out."""
    used = records[warmup:]
    assert used, f"{len(records)} steps and {warmup} of warm-up leave none to measure"
    seconds = sum(record[m.STEP_SECONDS.name] for record in used)
    figures = {RATE: sum(record[m.ROWS.name] for record in used) / seconds}
    for metric in FIGURES:
        tally, how = Tally(), Reduce.MEAN if metric in SECONDS_A_STEP else metric.steps
        assert how is not None, f"{metric.name} has no value of a run"
        for record in used:
            if (value := record[metric.name]) is not None:
                tally.add(value, record[m.STEP_SECONDS.name] if how is Reduce.TIME_MEAN else 1)
        if (whole := tally.value(how)) is not None:
            figures[metric.name] = whole
    return figures


def summarize(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Each figure that all runs of a variant know."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: spread_of([run[name] for run in runs]) for name in names}


def spread_of(values: Sequence[float]) -> Spread:
    middle = median(values)
    return Spread(middle, (max(values) - min(values)) / abs(middle) if middle else 0.0)


def ratios(runs: Mapping[str, Sequence[Mapping[str, float]]], of: str) -> dict[str, Spread]:
    """Rate of variant `of` by that of every other one, round by round, as far as both have come: a machine that drifts
    hurts both alike."""
    return {
        name: spread_of([mine[RATE] / other[RATE] for mine, other in zip(runs[of], others, strict=False)])
        for name, others in runs.items()
        if name != of
    }


def loads(breakdown: Breakdown) -> dict[str, float]:
    """Seconds a step and device that the modules themselves take on each side."""
    return {
        side: breakdown.step_seconds * sum(share for name, share in shares.items() if name in MODEL_WORK)
        for side, shares in breakdown.shares.items()
        if side in DEVICE_SIDES
    }


def limits(
    breakdown: Breakdown, figures: Mapping[str, float], fed: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Limits in samples/s by the trace and the figures of a run with processes of both sides.

    `fed`: figures of a run of the same packs whose consumers have all features of a step before its first pack.
    """
    busy = [seconds / breakdown.step_seconds for seconds in loads(breakdown).values()]
    ideal = figures[RATE] * breakdown.step_seconds / breakdown.ideal_seconds
    found = {"ideal": ideal, "split bound": figures[RATE] / max(busy)}
    ready = figures if fed is None else fed
    if (gap := ready.get(m.MFU_GAP.name)) is not None and gap < 100:
        found["LLM-only"] = ready[RATE] / (1 - gap / 100)
    return found
