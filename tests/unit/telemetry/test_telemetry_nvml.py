"""Sampling of devices through nvidia-ml-py's own way of loading a library, which is a small one made here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from busy import allowed

SAMPLER = """
import dataclasses, json, sys, time
from flowtrain.telemetry.nvml import STARTING, DeviceSampler
sampler = DeviceSampler(float(sys.argv[1]))
before = None
for line in sys.stdin:
    cpu, began = time.process_time(), time.monotonic()
    if line.startswith("sleep"):
        time.sleep(float(line.split()[1]))
        print(json.dumps((time.process_time() - cpu) / (time.monotonic() - began)), flush=True)
        continue
    rounds = 2 if before is not None else 1  # one may have begun before the change
    while rounds:
        now = sampler.latest()
        if now is not before and now.state != STARTING or now.final:
            before, rounds = now, rounds - 1
        time.sleep(0.002)
    print(json.dumps(dataclasses.asdict(now)), flush=True)
sampler.close()
print(json.dumps(sampler._thread.is_alive()), flush=True)
"""


class Sampled:
    """A process that samples, and the file that says what its library answers."""

    def __init__(self, library: Path, control: Path, seconds: float, **answers: int) -> None:
        self._control = control
        self.answer(**answers)
        command = [sys.executable, "-c", SAMPLER, str(seconds)]
        self._process = subprocess.Popen(
            command,
            env=fake_nvml.environment(library, control),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def answer(self, **answers: int) -> None:
        fake_nvml.answer(self._control, **answers)

    def ask(self, text: str = "sample") -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> bool:
        """Whether the thread outlived its end."""
        alive, _ = self._process.communicate(timeout=allowed(20))
        return bool(json.loads(alive))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=allowed(20))


@pytest.fixture
def sample(nvml_library: Path, tmp_path: Path) -> Iterator[Callable[..., Sampled]]:
    made: list[Sampled] = []

    def start(seconds: float = 0.02, library: Path = nvml_library, **answers: int) -> Sampled:
        made.append(Sampled(library, tmp_path / f"answers-{len(made)}", seconds, **answers))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_every_figure_is_read_and_the_thread_ends(sample: Callable[..., Sampled]) -> None:
    sampled = sample(throttle=0x04 | 0x40 | 0x01)
    found = sampled.ask()
    found = sampled.ask()
    assert (found["state"], found["final"], sorted(found["devices"])) == ("ok", False, ["0", "1"])
    assert found["devices"]["1"] == {
        "state": "ok",
        "utilization_percent": 50.0,
        "memory_used_gib": 1.5,
        "power_watts": 312.5,
        "temperature_celsius": 61.0,
        "pcie": 2e6,
        "nvlink": 0.0,
        "throttled": 1.0,
        "throttle": "power cap, heat (hardware)",
    }
    assert sampled.end() is False


def test_links_are_told_by_what_passed_between_two_samples(sample: Callable[..., Sampled]) -> None:
    sampled = sample(links=1024)
    assert sampled.ask()["devices"]["0"]["nvlink"] in (None, 0.0)
    sampled.ask("sleep 0.1")
    sampled.answer(links=1 << 30)
    rates = [sampled.ask()["devices"]["0"]["nvlink"] for _ in range(3)]
    assert rates[-1] == 0.0
    sampled.answer(fail_link=3)
    assert sampled.ask()["devices"]["0"]["nvlink"] is None
    assert sampled.ask()["devices"]["0"]["state"] == "ok", "a device without links lacks nothing"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"init": 9}, "no driver: its kernel module is not loaded"),
        ({"init": 18}, "driver mismatch"),
        ({"init": 4}, "no permission"),
        ({"init": 999}, "NVML error: Unknown Error"),
        ({"count": 0}, "no device"),
        ({"fail_count": 4}, "no permission"),
    ],
)
def test_a_node_without_figures_says_why_and_has_no_device(
    sample: Callable[..., Sampled], answers: dict[str, int], says: str
) -> None:
    sampled = sample(**answers)
    found = sampled.ask()
    assert found["state"].startswith(says)
    assert (found["devices"], found["final"]) == ({}, True)
    assert sampled.end() is False


def test_no_library_is_no_driver(sample: Callable[..., Sampled], tmp_path: Path) -> None:
    found = sample(library=tmp_path).ask()
    if found["state"] == "ok":
        pytest.skip("this machine has a driver of its own")
    assert found["state"] == "no driver: libnvidia-ml.so.1 is not here"


def test_a_device_in_parts_has_no_utilisation_but_the_rest(sample: Callable[..., Sampled]) -> None:
    device = sample(mig=1).ask()["devices"]["0"]
    assert device["state"].startswith("MIG")
    assert device["utilization_percent"] is None
    assert device["memory_used_gib"] == 1.5


def test_a_figure_that_may_not_be_read_is_null_beside_the_others(sample: Callable[..., Sampled]) -> None:
    device = sample(fail_power=4).ask()["devices"]["0"]
    assert device["state"].startswith("no permission")
    assert (device["power_watts"], device["temperature_celsius"]) == (None, 61.0)


def test_an_error_in_mid_run_passes(sample: Callable[..., Sampled]) -> None:
    sampled = sample()
    assert sampled.ask()["devices"]["0"]["utilization_percent"] == 40.0
    sampled.answer(fail_utilization=999)
    device = sampled.ask()["devices"]["0"]
    assert (device["utilization_percent"], device["state"]) == (None, "NVML error: Unknown Error")
    sampled.answer()
    device = sampled.ask()["devices"]["0"]
    assert (device["utilization_percent"], device["state"]) == (40.0, "ok")


def test_a_device_off_the_bus_has_no_figure_and_the_other_all(sample: Callable[..., Sampled]) -> None:
    sampled = sample()
    sampled.ask()
    sampled.answer(lost=1)
    found = sampled.ask()
    gone, left = found["devices"]["1"], found["devices"]["0"]
    assert gone.pop("state") == "lost: the device has fallen off the bus"
    assert set(gone.values()) == {None}
    assert (left["state"], left["utilization_percent"]) == ("ok", 40.0)


def test_sampling_takes_a_thousandth_of_a_core(sample: Callable[..., Sampled]) -> None:
    sampled = sample(seconds=0.1)
    sampled.ask()
    share = sampled.ask("sleep 1.5") * 0.1 / 5.0  # a run's default is every five seconds
    assert share <= 0.001, f"{100 * share:.3f} % of a core"
