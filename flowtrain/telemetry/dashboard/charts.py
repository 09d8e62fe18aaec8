"""The charts of the page, as one table; what a metric is and means comes from the table of metrics.

A chart shows those of its metrics that a run's records have; of a split metric, every part. A metric that no chart
names is under "All metrics" of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Metric

MODULES = ("encoder", "projector", "backbone")


@dataclass(frozen=True, slots=True)
class Line:
    """`key`: who has this colour in every chart; empty: the next free one. `dashed`: a bound, not measured."""

    metric: Metric
    label: str
    key: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`prefix`: names shown although no line names them; `empty`: why there may be nothing to see."""

    key: str
    group: str
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    prefix: str = ""
    note: str = ""
    empty: str = "No record has a value yet."
    log: bool = False
    least: float | None = None
    most: float | None = None


LEARNING, SPEED, FLOW, PACKS, PLAN = "Learning", "Speed", "Flow", "Packs and ranks", "Rows and plan"
REPLAN = "Recorded with allocation.replan: propose or auto."

CHARTS = (
    Chart(
        "loss",
        LEARNING,
        "Loss",
        "",
        (Line(m.LOSS, "training", "all"), Line(m.EVAL_LOSS, "evaluation", "eval")),
        note="Mean over the trained tokens of the step.",
    ),
    Chart(
        "grad_norm",
        LEARNING,
        "Gradient norm",
        "",
        (Line(m.GRAD_NORM, "all modules", "all"), Line(m.GRAD_NORM_OF, "")),
        note="Before clipping.",
        log=True,
    ),
    Chart(
        "lr",
        LEARNING,
        "Learning rate",
        "",
        (Line(m.LR, "largest", "all", dashed=True), Line(m.LR_OF, "")),
        least=0,
    ),
    Chart(
        "tokens",
        LEARNING,
        "Tokens of a step",
        "tokens",
        (
            Line(m.TEXT_TOKENS, "text", "backbone"),
            Line(m.VISION_TOKENS, "vision", "encoder"),
            Line(m.TRAINED_TOKENS, "trained", "eval"),
        ),
        note="Of the rows trained; there is no padding.",
        least=0,
    ),
    Chart(
        "throughput",
        SPEED,
        "Throughput",
        "tokens/s",
        (Line(m.THROUGHPUT, "per device", "all"),),
        note="Text and vision tokens a second and device, producers included.",
        least=0,
    ),
    Chart(
        "mfu",
        SPEED,
        "MFU by module",
        "%",
        (
            Line(m.MFU, "all devices", "all"),
            Line(m.MFU_ENCODER, "encoder", "encoder"),
            Line(m.MFU_BACKBONE, "backbone", "backbone"),
            Line(m.MFU_LLM_ONLY, "backbone, LLM only", "backbone", dashed=True),
        ),
        note="Dotted: the backbone had it never waited for the encoder. The distance is the gap.",
        empty="The peak of these devices is not known: see mfu/peak_source.",
        least=0,
    ),
    Chart(
        "gap",
        SPEED,
        "Gap to LLM-only",
        "%",
        (Line(m.MFU_GAP, "of the step", "wait"),),
        note="Share of the step by which waiting for the encoder prolonged it.",
        least=0,
    ),
    Chart(
        "step_seconds",
        SPEED,
        "Step time",
        "s",
        (Line(m.STEP_SECONDS, "end to end", "all"),),
        least=0,
    ),
    Chart(
        "rates",
        FLOW,
        "Flow rates",
        "tokens/s",
        (Line(m.PRODUCTION_RATE, "production", "encoder"), Line(m.CONSUMPTION_RATE, "consumption", "backbone")),
        note="Vision tokens per busy second; the smaller one is the bottleneck.",
        least=0,
    ),
    Chart(
        "pool",
        FLOW,
        "Pool occupancy",
        "%",
        (Line(m.POOL_OCCUPANCY, "largest of the step", "pool"),),
        least=0,
        most=100,
    ),
    Chart(
        "waiting",
        FLOW,
        "Starvation and stall",
        "s",
        (
            Line(m.STARVATION, "starvation: consumers wait", "backbone"),
            Line(m.STALL, "stall: producers wait", "encoder"),
        ),
        note="Seconds of each step, mean over the ranks of a side.",
        least=0,
    ),
    Chart(
        "pool_bytes",
        FLOW,
        "Bytes through the pool",
        "B",
        (Line(m.POOL_BYTES_IN, "put by producers", "encoder"), Line(m.POOL_BYTES_OUT, "got by consumers", "backbone")),
        least=0,
    ),
    Chart(
        "imbalance",
        PACKS,
        "Imbalance over ranks",
        "max / mean",
        (
            Line(m.PACK_IMBALANCE, "consumers, predicted", "backbone", dashed=True),
            Line(m.PACK_IMBALANCE_MEASURED, "consumers, measured", "backbone"),
            Line(m.ENCODE_IMBALANCE, "producers, predicted", "encoder", dashed=True),
            Line(m.ENCODE_IMBALANCE_MEASURED, "producers, measured", "encoder"),
        ),
        note="1 is even.",
        least=1,
    ),
    Chart(
        "load",
        PACKS,
        "Load by rank",
        "of the mean",
        (Line(m.LOAD_OF, ""),),
        note="Measured time of a rank over the mean of its side.",
        empty="Of sides of 2 to 16 ranks; of more, imbalance over ranks tells.",
        least=0,
    ),
    Chart(
        "fill",
        PACKS,
        "Packs",
        "%",
        (Line(m.PACK_FILL, "fill", "backbone"), Line(m.COST_ERROR, "error of predicted cost", "wait")),
        least=0,
    ),
    Chart("memory", PACKS, "Memory", "GiB", (Line(m.MEMORY, "highest rank", "pool"),), least=0),
    Chart(
        "device",
        PACKS,
        "Device utilisation",
        "%",
        prefix="device/utilization",
        empty="No record has device metrics: they need an NVIDIA device that the run may sample.",
        least=0,
        most=100,
    ),
    Chart(
        "skipped",
        PLAN,
        "Rows skipped",
        "rows",
        (Line(m.ROWS_SKIPPED, "read and not trained", "wait"), Line(m.ROWS_SKIPPED_OF, "")),
        note="Of each step; all of the run and some ids: table below.",
        least=0,
    ),
    Chart("drift", PLAN, "Drift of the load", "%", (Line(m.PLAN_DRIFT, "from the plan's", "wait"),), empty=REPLAN),
    Chart(
        "producers",
        PLAN,
        "Producers",
        "",
        (Line(m.PLAN_PRODUCERS, "running", "encoder"), Line(m.PLAN_PROPOSAL, "proposed", "eval")),
        empty=REPLAN,
        least=0,
    ),
)


def shown(chart: Chart, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The chart's series among the metrics of a run: name in the records, label, colour key."""
    names = list(names)
    for line in chart.lines:
        for name in names:
            part = line.metric.part(name)
            if name == line.metric.name:
                yield {"name": name, "label": line.label, "key": line.key, "dashed": line.dashed}
            elif part is not None:
                yield {"name": name, "label": part, "key": part if part in MODULES else "", "dashed": line.dashed}
    if chart.prefix:
        for name in names:
            if name.startswith(chart.prefix):
                yield {"name": name, "label": name.removeprefix(chart.prefix).strip("/"), "key": "", "dashed": False}


def described(name: str) -> dict[str, str]:
    """Unit and meaning of a metric of a record; a run of another version may have one that is not known here."""
    try:
        metric, _ = METRICS.find(name)
    except KeyError:
        return {"name": name, "unit": "", "meaning": "not in this version's table of metrics"}
    return {"name": name, "unit": metric.unit, "meaning": metric.meaning}


def page_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Every chart with the series that these metrics give it: JSON ready."""
    names = list(names)
    return [
        {
            "key": chart.key,
            "group": chart.group,
            "title": chart.title,
            "unit": chart.unit,
            "note": chart.note,
            "empty": chart.empty,
            "log": chart.log,
            "least": chart.least,
            "most": chart.most,
            "series": list(shown(chart, names)),
        }
        for chart in CHARTS
    ]
