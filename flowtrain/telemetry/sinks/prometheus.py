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
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app, start_http_server
from prometheus_client.metrics_core import Metric as FamilyMetric

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind, Metric
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

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
LAST_FETCH_SECONDS = 15.0
"""How long a run that has ended waits at most for its last values to be fetched."""


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


def series(record: Mapping[str, Any]) -> list[tuple[Metric, str | None, float]]:
    """The same for sinks that keep the newest value of each: NaN where it is not known, nothing for a counter."""
    found = [(*METRICS.find(name), value) for name, value in record.items()]
    return [
        (metric, part, math.nan if value is None else float(value))
        for metric, part, value in found
        if metric.kind is Kind.GAUGE or (metric.kind is Kind.COUNTER and value is not None)
    ]


class WholeSteps(CollectorRegistry):
    """What is fetched is of one step, never half of one and half of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = Lock()

    def collect(self) -> Iterator[FamilyMetric]:
        with self.writing:
            yield from list(super().collect())


class Answers:
    """When metrics were fetched, whole answers only."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_begun = 0
        self._newest = -1
        self._times: deque[float] = deque(maxlen=2)

    def counted(self, app: WSGIApplication) -> WSGIApplication:
        def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterator[bytes]:
            with self._changed:
                number = self._num_begun
                self._num_begun += 1
            yield from app(environ, start)
            with self._changed:  # what was yielded has been sent
                self._newest = max(self._newest, number)
                self._times.append(time.monotonic())
                self._changed.notify_all()

        return answer

    def wait_for_one_more(self) -> None:
        """Until whoever fetches regularly has begun and done so once more; at once where nobody does."""
        with self._changed:
            if len(self._times) < 2:
                return
            before, last = self._times
            due = last + 1.5 * (last - before) - time.monotonic()
            first = self._num_begun
            self._changed.wait_for(lambda: self._newest >= first, min(max(due, 0.0), LAST_FETCH_SECONDS))


class PrometheusSink:
    """`port`: where it listens; `telemetry.prometheus_port: 0` takes a free one. A gauge that is not known is NaN.

    A run that ends in order stays to be fetched once more: its last values and `flowtrain_ended`, by which an alert
    tells it from one that was lost.
    """

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
        self._ended = Gauge("flowtrain_ended", "1 once the run has ended in order", ("run",), registry=self._registry)
        self._ended.labels(self._run).set(0)
        self._answers = Answers()
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise PlanError(
                f"telemetry sink prometheus cannot listen on {host}:{port}: {error.strerror or error}; set "
                f"telemetry.prometheus_port to a free port (0: any) or telemetry.prometheus_host to an address of this "
                f"machine"
            ) from error
        self._server.set_app(self._answers.counted(make_wsgi_app(self._registry)))
        self.port = self._server.server_port
        tell(f"metrics are at http://{host}:{self.port}/metrics", stream=sys.stdout)

    def write(self, record: Mapping[str, Any]) -> None:
        with self._registry.writing:
            self._step.labels(self._run).set(record["step"])
            for metric, part, value in series(record):
                child = self._by_metric[metric].labels(self._run, *(() if part is None else (part,)))
                if isinstance(child, Gauge):
                    child.set(value)
                else:
                    child.inc(value)

    def close(self, in_order: bool) -> None:
        if in_order:
            self._ended.labels(self._run).set(1)
            self._answers.wait_for_one_more()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_SECONDS)
