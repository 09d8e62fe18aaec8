"""A real Prometheus, as deploy/ sets it up, over real runs: panels show what metrics.jsonl holds, alerts fire.

Its minutes are seconds here, in the windows and delays of every alert; the expressions are those of deploy/. The real
delays are tested by promtool (test_telemetry_alerts.py).
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_nvml
import psutil
import pytest
from busy import allowed
from integration_runs import EXAMPLES, Train, lines
from launched import Launch, until
from prometheus_server import DEPLOY, Prometheus

from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind
from flowtrain.telemetry.sinks.prometheus import prometheus_name

YES_OR_NO = {"device/throttled/DEVICE"}


def watched(port: int) -> tuple[str, ...]:
    return ("telemetry.sinks=[prometheus]", f"telemetry.prometheus_port={port}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def panel_queries(run: str) -> list[str]:
    """What the dashboard asks for when somebody has chosen this run and every driver."""
    dashboard = json.loads((DEPLOY.parent / "grafana/flowtrain.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [query.replace("$run", run).replace("$instance", ".*") for query in queries]


def key_of(name: str, labels: dict[str, str]) -> tuple[str, str]:
    """The name in metrics.jsonl of a series, and that of its metric."""
    [metric] = [metric for metric in METRICS if metric.kind is not Kind.FACT and prometheus_name(metric) == name]
    return (metric.of(labels[metric.label]) if metric.label else metric.name), metric.name


def check_panels(server: Prometheus, run: str, records: dict[int, dict[str, Any]]) -> None:
    """Every sample of every panel is the record's of the step that was served with it."""
    [(_, steps)] = server.samples(f'flowtrain_step{{run="{run}"}}')
    for query in panel_queries(run):
        series = server.samples(query)
        known = 0
        for labels, values in series:
            key, metric = key_of(labels["__name__"], labels)
            seen = set()
            last = None
            for at, value in sorted(values.items()):
                if at not in steps or int(steps[at]) not in records:
                    continue
                record = records[int(steps[at])]
                expected = record.get(key)
                if metric == "validation_metrics/loss":  # one that was not due leaves the one before
                    expected = last = expected if key in record else last
                    if expected is None:
                        continue
                assert (math.isnan(value) and expected is None) or value == expected, f"{query} at step {steps[at]}"
                if not math.isnan(value):
                    seen.add(value)
            if any(record.get(key) is not None for record in records.values()):  # `n0` is a node not yet looked at
                known += 1
                assert len(seen) >= (2 if metric in YES_OR_NO else 3), f"{query} {labels} showed {seen}"
        assert known, f"nothing for {query}"


def fires(server: Prometheus, alert: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + allowed(40)
    while alert not in server.firing():
        assert time.monotonic() < deadline, f"{alert} does not fire; firing: {server.firing()}"
        meanwhile()
        time.sleep(0.1)


@contextmanager
def slowed(process: psutil.Process) -> Iterator[Callable[[], None]]:
    """Each call lets the process go on for a moment of half a second."""
    process.suspend()

    def step() -> None:
        time.sleep(0.4)
        process.resume()
        time.sleep(0.05)
        process.suspend()

    yield step
    process.resume()


@pytest.fixture
def devices(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPUs for NVML only; what they answer is in the file."""
    control = tmp_path / "answers"
    fake_nvml.answer(control)
    for name, value in fake_nvml.environment(nvml_library, control).items():
        monkeypatch.setenv(name, value)
    return control


def test_panels_show_the_run_and_starved_slow_and_lost_producers_are_told_of(tmp_path: Path, devices: Path) -> None:
    held_out = EXAMPLES / "emoji/data/test.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(held_out.read_text().splitlines(keepends=True)[:6]))
    (tmp_path / "images").symlink_to(held_out.parent / "images")
    port = free_port()
    overrides = (
        "producers={num: 2, threads: 1}",
        "consumers={num: 2, threads: 1}",
        "debug.delays.producer_unit_ms={0: 60, 1: 90}",
        "train.step={samples: 12}",
        "packing.max_tokens=512",
        f"data.eval={few}",
        "train.eval_every=3",
        "telemetry.device_seconds=0.2",
        *watched(port),
    )
    with Launch("emoji", tmp_path / "watched", *overrides) as launch, Prometheus(tmp_path / "server", port) as server:
        for step in range(1, 13):
            launch.until_step(step)
            fake_nvml.answer(
                devices,
                utilization=step,
                memory=100 * step,
                power=1000 * step,
                temperature=40 + step,
                pcie=1000 + step,
                growth=step * 1024,
                throttle=step % 2 * 4,
            )
        fires(server, "FlowTrainStarvedConsumers")
        check_panels(server, "watched", {record["step"]: record for record in launch.metrics()})
        producer = launch.stage("producer-0")
        with slowed(producer) as go_on:
            fires(server, "FlowTrainFallingMFU", go_on)
        assert "FlowTrainLostProducers" not in server.firing()
        launch.kill(producer)
        assert launch.end(within=15) == 5, launch.err
        fires(server, "FlowTrainLostProducers")


def test_stalled_producers_a_full_pool_and_losses_that_are_no_numbers_are_told_of_and_an_end_is_none(
    tmp_path: Path, train: Train
) -> None:
    port = free_port()
    overrides = (
        "train.max_steps=20",
        "train.freeze=[encoder]",
        "data.eval=null",
        "pool.bytes=5242880",
        "packing.max_tokens=512",
        "packing.lookahead=1",
        "debug.delays.consumer_pack_ms={0: 60}",
        "train.lr=1e30",
        "train.max_nonfinite_steps=100000",
        *watched(port),
    )
    with Prometheus(tmp_path / "server", port) as server, ThreadPoolExecutor(1) as thread:
        run = thread.submit(train, "emoji", *overrides, name="full")
        for alert in ("FlowTrainNonFiniteLoss", "FlowTrainStalledProducers", "FlowTrainPoolNearlyFull"):
            fires(server, alert)
        assert lines(run.result(timeout=allowed(60)) / "metrics.jsonl")[-1]["step"] == 20
        gone = 'max_over_time(up{job="flowtrain"}[3s]) == 0'
        until(lambda: server.ask("query", query=gone)["result"], "no more metrics", allowed(20))
        assert "FlowTrainLostProducers" not in server.firing()
