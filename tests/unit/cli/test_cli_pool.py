"""`flowtrain pool ls`, `sweep` and `bench`, as a user calls them, on a registry of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.pool.host import host_identity, machine_name
from flowtrain.pool.registry import Entry, Registration, registry_folder, start_of


def flowtrain(runtime: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "flowtrain.cli.main", "pool", *arguments]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    return ran.stdout


@pytest.fixture
def entries(tmp_path: Path) -> list[Registration]:
    """A live owner's entry, and one that a killed run has left."""
    folder = registry_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    started = start_of(os.getpid())
    assert started is not None
    live = Entry("a-1", "/runs/a", "producer 0", 0, os.getpid(), started, machine_name(), host_identity(), 4096, 3, 1)
    dead = replace(live, run="b-2", started=started + 1, role="producer 1", owner=1)
    return [Registration(folder / f"{entry.run}.json", entry) for entry in (live, dead)]


def test_owners_are_listed_and_the_dead_ones_swept(entries: list[Registration], tmp_path: Path) -> None:
    entries[0].used(192)
    told = flowtrain(tmp_path, "ls", "--json", str(tmp_path / "ls.json"))
    header, first, second = told.splitlines()
    assert header.split() == ["run", "role", "owner", "machine", "pid", "life", "used_bytes", "bytes", "run_dir"]
    place = ["0", machine_name(), str(os.getpid())]
    assert first.split() == ["a-1", "producer", "0", *place, "alive", "192", "4096", "/runs/a"]
    assert "dead" in second
    segments = json.loads((tmp_path / "ls.json").read_text())["segments"]
    assert [(s["run"], s["life"], s["used_bytes"]) for s in segments] == [("a-1", "alive", 192), ("b-2", "dead", 0)]

    flowtrain(tmp_path, "sweep", "--json", str(tmp_path / "sweep.json"))
    assert [s["run"] for s in json.loads((tmp_path / "sweep.json").read_text())["swept"]] == ["b-2"]
    assert "nothing to sweep" in flowtrain(tmp_path, "sweep")
    assert [line.split()[0] for line in flowtrain(tmp_path, "ls").splitlines()[1:]] == ["a-1"]
    entries[0].close()
    assert "no run holds pool memory" in flowtrain(tmp_path, "ls")


def test_the_pool_is_measured_on_this_machine(tmp_path: Path) -> None:
    told = flowtrain(tmp_path, "bench", "--rounds", "1", "--json", str(tmp_path / "bench.json"))
    rows = {row["figure"]: row["value"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert len(told.splitlines()) == len(rows) == 9
    assert all(figure in told for figure in rows)
    assert all(value > 0 for value in rows.values())
    assert rows["second reader, 64 MiB"] < 1000, "in microseconds: a copy of so many bytes would take longer"
