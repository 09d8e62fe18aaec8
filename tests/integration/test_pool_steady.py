"""A run takes no more of the machine than after its first steps, and nothing of another run (R05, R09, R11)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from launched import Launch

MIB = 2**20
GROWTH_BYTES = 6 * MIB
"""Allowed to a process between two looks, 960 rows apart: the interpreter's own caches still fill a little."""


def descriptors(*processes: psutil.Process) -> list[int]:
    return [process.num_fds() for process in processes]


def resident_bytes(*processes: psutil.Process) -> list[int]:
    """Least of a few looks, as a look may fall into the middle of a step."""
    looks = [[process.memory_info().rss for process in processes] for _ in range(5)]
    return [min(of_process) for of_process in zip(*looks, strict=True)]


def listed(tmp_path: Path) -> list[dict[str, Any]]:
    """What `flowtrain pool ls` tells of the runs under this folder."""
    file = tmp_path / "ls.json"
    command = [sys.executable, "-m", "flowtrain.cli.main", "pool", "ls", "--json", str(file)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return [one for one in json.loads(file.read_text())["segments"] if Path(one["run_dir"]).parent == tmp_path]


def test_descriptors_and_memory_are_constant_in_steps_and_images(tmp_path: Path) -> None:
    with Launch("digits", tmp_path / "run") as launch:
        launch.until_step(60)
        stages = [launch.stage(name) for name in ("producer-0", "consumer-0", "reader-0")]
        opened, resident = descriptors(*stages), resident_bytes(*stages)
        launch.until_step(180)
        assert descriptors(*stages) == opened
        grown = [after - before for after, before in zip(resident_bytes(*stages), resident, strict=True)]
        assert max(grown) < GROWTH_BYTES, f"producer, consumer, reader grew by {grown} bytes"


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    """Each has its own segment, both are listed, and the end of one changes nothing for the other."""
    steps = ("train.max_steps=12", "debug.delays.consumer_pack_ms={0: 100}")
    with Launch("digits", tmp_path / "one", *steps) as one, Launch("digits", tmp_path / "two", *steps) as two:
        pids, consumers = {}, []
        for launch in (one, two):
            launch.until_step(1)
            consumers.append(launch.stage("consumer-0"))
            consumers[-1].suspend()  # neither can end before it is told to
            pids[launch.run_dir.name] = launch.stage("producer-0").pid
        found = listed(tmp_path)
        assert {Path(entry["run_dir"]).name: entry["pid"] for entry in found} == pids
        assert [entry["life"] for entry in found] == ["alive", "alive"]
        consumers[0].resume()
        assert one.end(within=100) == 0, one.err
        assert [(Path(entry["run_dir"]).name, entry["life"]) for entry in listed(tmp_path)] == [("two", "alive")]
        consumers[1].resume()
        assert two.end(within=100) == 0, two.err
        assert [len(launch.metrics()) for launch in (one, two)] == [12, 12]
    assert listed(tmp_path) == []
