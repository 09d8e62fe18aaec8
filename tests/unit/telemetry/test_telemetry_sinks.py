"""Sinks of metrics: what they show of a record, and what becomes of a run whose sink cannot start or breaks."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from busy import allowed

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.sinks import OPENERS, Sink, open_sinks
from flowtrain.telemetry.sinks.prometheus import PrometheusSink, series

RECORD: dict[str, Any] = {
    "step": 1,
    "tokens/trained": 50,
    "loss_metrics/global_avg_loss": 1.25,
    "loss_hex": "0x1.4p+0",
    "update_applied": True,
    "lr/encoder": 1e-4,
    "mfu(%)": None,
    "grad_norm": float("nan"),
}


def config(tmp_path: Path, *sinks: str, **more: Any) -> Config:
    telemetry = {"sinks": list(sinks), "prometheus_port": 0, **more}
    values = {"model": {"path": tmp_path}, "data": {"train": tmp_path / "rows.jsonl"}, "telemetry": telemetry}
    return Config.model_validate(values)


def fetch(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = [line.split(" ") for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_prometheus_fetches_the_newest_values_and_sums(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path, "prometheus"), tmp_path, {"prometheus": PrometheusSink}) as opened:
        [guarded] = opened.sinks
        sink = guarded._sink  # type: ignore[attr-defined]
        guarded.write(RECORD)
        guarded.write(RECORD | {"step": 2, "loss_metrics/global_avg_loss": 1.0})
        found = fetch(sink.port)
    run = f'{{run="{tmp_path.name}"}}'
    assert found[f"flowtrain_step{run}"] == 2
    assert found[f"flowtrain_loss_metrics_global_avg_loss{run}"] == 1.0
    assert found[f"flowtrain_tokens_trained_total{run}"] == 100
    assert found[f'flowtrain_lr_by_module{{module="encoder",run="{tmp_path.name}"}}'] == 1e-4
    assert math.isnan(found[f"flowtrain_mfu_percent{run}"]), "what is not known is no 0"
    assert not [name for name in found if "loss_hex" in name or "applied" in name]
    with pytest.raises(OSError, match="refused"):
        fetch(sink.port)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_run_that_ended_in_order_waits_for_who_fetches_regularly(in_order: bool, tmp_path: Path) -> None:
    found: list[dict[str, float]] = []
    fetched = threading.Event()

    def fetch_often(port: int) -> None:
        with suppress(OSError):
            while True:
                found.append(fetch(port))
                if len(found) == 3:
                    fetched.set()
                time.sleep(0.2)

    with open_sinks(config(tmp_path, "prometheus"), tmp_path, {"prometheus": PrometheusSink}) as opened:
        port = opened.sinks[0]._sink.port  # type: ignore[attr-defined]
        fetcher = threading.Thread(target=fetch_often, args=(port,))
        fetcher.start()
        assert fetched.wait(20)
        opened.sinks[0].write(RECORD)
        opened.in_order = in_order
    fetcher.join(20)
    run = f'{{run="{tmp_path.name}"}}'
    assert {one[f"flowtrain_ended{run}"] for one in found[:3]} == {0.0}
    if in_order:
        assert found[-1][f"flowtrain_ended{run}"] == 1.0
        assert found[-1][f"flowtrain_step{run}"] == 1
    else:
        assert found[-1][f"flowtrain_ended{run}"] == 0.0


def test_a_run_that_nobody_fetches_from_ends_at_once(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path, "prometheus"), tmp_path, {"prometheus": PrometheusSink}) as opened:
        fetch(opened.sinks[0]._sink.port)  # type: ignore[attr-defined]
        opened.in_order = True
        began = time.monotonic()
    assert time.monotonic() - began < allowed(2.0)


def test_what_is_not_known_any_more_is_nan_to_sinks_that_keep_the_newest() -> None:
    found = {(metric.name, part): value for metric, part, value in series(RECORD | {"rows": None})}
    assert math.isnan(found["mfu(%)", None])
    assert found["lr/MODULE", "encoder"] == 1e-4
    assert ("rows", None) not in found, "a sum stays what it is"
    assert ("loss_hex", None) not in found


def test_a_port_that_is_taken_stops_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opened = open_sinks(config(tmp_path, "prometheus", prometheus_port=port), tmp_path, OPENERS)
        with (
            pytest.raises(PlanError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use.*prometheus_port"),
            opened,
        ):
            pass


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="the extra flowtrain[tensorboard] is not installed")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(config(tmp_path, "tensorboard"), tmp_path, OPENERS) as opened:
        [sink] = opened.sinks
        sink.write(RECORD)
        sink.write(RECORD | {"step": 2, "loss_metrics/global_avg_loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "lr/encoder" in events.Tags()["tensors"]
    losses = events.Tensors("loss_metrics/global_avg_loss")
    assert [(event.step, event.tensor_proto.float_val[0]) for event in losses] == [(1, 1.25), (2, 1.0)]


@pytest.mark.skipif(find_spec("wandb") is None, reason="the extra flowtrain[wandb] is not installed")
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    with open_sinks(config(tmp_path, "wandb", wandb_mode="offline"), run_dir, OPENERS) as opened:
        [sink] = opened.sinks
        sink.write(RECORD)
        sink.write(RECORD | {"step": 2})
    [written] = run_dir.glob("wandb/offline-run-*/*.wandb")
    # W&B's own process writes the file, and may do so just behind the end of the run.
    deadline = time.monotonic() + allowed(10)
    while b"global_avg_loss" not in written.read_bytes():
        assert time.monotonic() < deadline, written.read_bytes()
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_extra_that_is_not_installed_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"flowtrain.telemetry.sinks.{name}.find_spec", lambda _: None)
    opened = open_sinks(config(tmp_path, name), tmp_path, OPENERS)
    with pytest.raises(PlanError, match=rf"pip install 'flowtrain\[{name}\]'"), opened:
        pass


class Breaks:
    """Takes one record."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.taken: list[Mapping[str, Any]] = []
        self.closed = 0

    def write(self, record: Mapping[str, Any]) -> None:
        self.taken.append(record)
        if len(self.taken) > 1:
            raise ConnectionResetError("gone")

    def close(self, in_order: bool) -> None:
        self.closed += 1


def test_a_sink_that_breaks_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    made: list[Breaks] = []

    def opener(config: Config, run_dir: Path) -> Sink:
        made.append(Breaks(config, run_dir))
        return made[-1]

    openers = {"tensorboard": opener, "prometheus": PrometheusSink}
    with open_sinks(config(tmp_path, "tensorboard", "prometheus"), tmp_path, openers, warnings.append) as opened:
        sinks = opened.sinks
        for step in (1, 2, 3):
            for sink in sinks:
                sink.write(RECORD | {"step": step})
        found = fetch(sinks[1]._sink.port)  # type: ignore[attr-defined]
    assert found[f'flowtrain_step{{run="{tmp_path.name}"}}'] == 3
    assert warnings == ["warning: telemetry sink tensorboard broke and is given up (ConnectionResetError: gone)"]
    assert (len(made[0].taken), made[0].closed) == (2, 1)


def test_a_sink_whose_library_fails_at_start_stops_the_run_and_closes_the_others(tmp_path: Path) -> None:
    made: list[Breaks] = []

    def works(config: Config, run_dir: Path) -> Sink:
        made.append(Breaks(config, run_dir))
        return made[-1]

    def fails(config: Config, run_dir: Path) -> Sink:
        raise RuntimeError("no key\nat all")

    openers = {"tensorboard": works, "wandb": fails}
    opened = open_sinks(config(tmp_path, "tensorboard", "wandb"), tmp_path, openers)
    with pytest.raises(PlanError, match="telemetry sink wandb cannot start: RuntimeError: no key at all; "), opened:
        pass
    assert made[0].closed == 1


def test_rays_agent_needs_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give `cluster\.address`"):
        config(tmp_path, "ray")
