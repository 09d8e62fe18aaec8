"""Metrics of the newest step for a Prometheus server to fetch, from the driver: `http://HOST:PORT/metrics`.

| metric | becomes |
|---|---|
| `mfu(%)`, gauge, % | `flowtrain_mfu_percent{run="digits"}` |
| `tokens/trained`, counter, tokens | `flowtrain_tokens_trained_total{run="digits"}` |
| `lr/MODULE`, gauge | `flowtrain_lr_by_module{run="digits",module="encoder"}` |

`run` is the name of the run's folder.

Loopback unless `telemetry.prometheus_host` says otherwise: there is no authentication.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.metrics_core import Metric as FamilyMetric

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind, Metric

UNIT_WORDS = {
    "%": "percent",
    "s": "seconds",
    "B": "bytes",
    "GiB": "gibibytes",
    "tokens/s": "tokens_per_second",
    "TFLOP/s": "teraflops",
    "FLOP": "flop",
    "W": "watts",
    "C": "celsius",
    "B/s": "bytes_per_second",
}
"""Units that a name of ours does not say in letters that Prometheus takes."""

CLOSE_SECONDS = 5.0


def prometheus_name(metric: Metric) -> str:
    """`flow/starvation(s)` as `flowtrain_flow_starvation_seconds`; what it is split by is a label."""
    base = re.sub(r"\(.*\)$", "", metric.name)
    if metric.label is not None:
        base = base.replace(f"/{metric.label.upper()}", f"/by_{metric.label}")
    words = [word for word in re.split(r"[^a-z0-9]+", f"flowtrain/{base}".lower()) if word]
    unit = UNIT_WORDS.get(metric.unit)
    if unit is not None and unit not in words:
        words.append(unit)
    return "_".join(words)


def numbers(record: Mapping[str, Any]) -> list[tuple[Metric, str | None, float]]:
    """What of a record is a number to show: metric, part of it, value."""
    found = ((*METRICS.find(name), value) for name, value in record.items() if value is not None)
    return [
        (metric, part, float(value))
        for metric, part, value in found
        if metric.kind is not Kind.FACT and math.isfinite(value)
    ]


class WholeSteps(CollectorRegistry):
    """What is fetched is of one step, never half of one and half of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = Lock()

    def collect(self) -> Iterator[FamilyMetric]:
        with self.writing:
            yield from list(super().collect())


class PrometheusSink:
    """`port`: where it listens; `telemetry.prometheus_port: 0` takes a free one. A gauge that is not known is NaN."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        host, port = config.telemetry.prometheus_host, config.telemetry.prometheus_port
        self._run = run_dir.name
        self._registry = WholeSteps()
        self._by_metric: dict[Metric, Gauge | Counter] = {}
        for metric in METRICS:
            if metric.kind is not Kind.FACT:
                kind = Counter if metric.kind is Kind.COUNTER else Gauge
                labels = ("run", metric.label) if metric.label else ("run",)
                made = kind(prometheus_name(metric), metric.meaning, labels, registry=self._registry)
                self._by_metric[metric] = made
                if metric.kind is Kind.COUNTER and not metric.label:
                    made.labels(self._run)  # 0 from the start: a rate needs the value before the first amount
        self._step = Gauge("flowtrain_step", "newest finished update", ("run",), registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise PlanError(
                f"telemetry sink prometheus cannot listen on {host}:{port}: {error.strerror or error}; set "
                f"telemetry.prometheus_port to a free port (0: any) or telemetry.prometheus_host to an address of this "
                f"machine"
            ) from error
        self.port = self._server.server_port
        print(f"metrics are at http://{host}:{self.port}/metrics", flush=True)

    def write(self, record: Mapping[str, Any]) -> None:
        with self._registry.writing:
            self._step.labels(self._run).set(record["step"])
            for name, value in record.items():
                metric, part = METRICS.find(name)
                if metric.kind is Kind.FACT:
                    continue
                child = self._by_metric[metric].labels(self._run, *(() if part is None else (part,)))
                if isinstance(child, Gauge):
                    child.set(math.nan if value is None else value)
                elif value is not None:
                    child.inc(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_SECONDS)
