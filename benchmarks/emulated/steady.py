"""Two hundred steps: what processes hold after the first quarter is what they hold at the end.

Memory is looked at in two ways. A process's unique set has the pages of libraries that no other process has mapped,
which are its own or shared as other programs of the machine come and go; what it has allocated, its anonymous resident
pages, has none of these.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.emulated.cases import FLOW, Bench
from benchmarks.record import Check
from flowtrain.emulate.executor import EmulatedExecutor
from flowtrain.emulate.run import emulate

STEPS = 200
STEP_SECONDS = 0.3
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "memory MiB": 5.0,
        "allocated MiB": 5.0,
        "controller MiB": 5.0,
        "controller allocated MiB": 5.0,
        "descriptors": 0.0,
        "segments": 0.0,
    }
)
"""Most growth of each, in percent."""

SAMPLE_SECONDS = 1.0


def measure(bench: Bench, executor: EmulatedExecutor) -> dict[str, Any]:
    choices = bench.choices(FLOW)
    assert choices is not None
    scale = bench.scale_of(STEP_SECONDS)
    emulation = bench.case.emulation(choices, time_scale=scale, jitter=bench.jitter, seed=bench.seed)
    config = bench.case.config(emulation, FLOW, bench.rows, bench.folder / "steady", STEPS)
    shutil.rmtree(config.run.dir, ignore_errors=True)
    with _watched(executor, config.run.dir) as samples:
        emulate(config, emulation, executor)
    quarter = [sample for sample in samples if STEPS // 4 <= sample["step"] <= STEPS // 2]
    last = [sample for sample in samples if sample["step"] > 3 * STEPS // 4]
    assert quarter, "no look at the second quarter of the run"
    assert last, "no look at the last quarter of the run"
    found: dict[str, Any] = {"case": "steady", "variant": f"{STEPS} steps", "devices": emulation.num_devices}
    for name in LIMITS:
        found[f"{name}, second quarter"] = max(sample[name] for sample in quarter)
        found[f"{name}, last quarter"] = max(sample[name] for sample in last)
    return found


@contextmanager
def _watched(executor: EmulatedExecutor, run_dir: Path) -> Iterator[list[dict[str, float]]]:
    """What the processes of devices hold together, once a second."""
    samples: list[dict[str, float]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append(_look(executor, run_dir))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _look(executor: EmulatedExecutor, run_dir: Path) -> dict[str, float]:
    metrics = run_dir / "metrics.jsonl"
    processes = [psutil.Process(pid) for pid in executor.pids.values()]
    return {
        "time": time.monotonic(),
        "step": metrics.read_bytes().count(b"\n") if metrics.is_file() else 0,
        "memory MiB": sum(process.memory_full_info().uss for process in processes) / 2**20,
        "allocated MiB": sum(map(_allocated, processes)) / 2**20,
        "descriptors": sum(process.num_fds() for process in processes),
        "segments": sum(_segments(process.pid) for process in processes),
        "controller MiB": psutil.Process().memory_full_info().uss / 2**20,
        "controller allocated MiB": _allocated(psutil.Process()) / 2**20,
    }


def _allocated(process: psutil.Process) -> int:
    """Bytes of its resident pages that are no file's and no segment's."""
    found = process.memory_info()
    return int(found.rss - found.shared)


def _segments(pid: int) -> int:
    """Mappings of pool segments in a process."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").count("flowtrain-pool")


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    (row,) = rows
    found = []
    for name, limit in LIMITS.items():
        before, after = (row[f"{name}, {which} quarter"] for which in ("second", "last"))
        found.append(Check(f"steady: growth of {name} (%)", 100.0 * (after / before - 1.0), "<=", limit))
    return found
