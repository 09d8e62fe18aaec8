"""Metrics of the newest step through the metrics agent of a running Ray cluster (`telemetry.sinks: [ray]`).

Whatever scrapes the cluster finds them beside Ray's own, as `ray_flowtrain_…` with the label `run`, without a port of
ours. An agent leaves out what is NaN: a gauge that is not known any more. Only with `cluster.address`: a local node
that the run starts is scraped by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.util.metrics import Counter, Gauge

from flowtrain.config.schema import Config
from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind, Metric
from flowtrain.telemetry.sinks.prometheus import prometheus_name, series


class RayMetricsSink:
    """The driver must have joined the cluster."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._by_metric: dict[Metric, Counter | Gauge] = {}
        for metric in METRICS:
            if metric.kind is not Kind.FACT:
                kind = Counter if metric.kind is Kind.COUNTER else Gauge
                tags = ("run", metric.label) if metric.label else ("run",)
                made = kind(prometheus_name(metric), metric.meaning, tag_keys=tags)
                made.set_default_tags({"run": run_dir.name})
                self._by_metric[metric] = made

    def write(self, record: Mapping[str, Any]) -> None:
        for metric, part, value in series(record):
            made, tags = self._by_metric[metric], {metric.label: part} if metric.label else None
            if isinstance(made, Gauge):
                made.set(value, tags)
            elif value > 0:
                made.inc(value, tags)

    def close(self, in_order: bool) -> None:
        """The agent drops what the driver told it when the driver leaves."""
