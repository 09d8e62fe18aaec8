"""Thirty emulated devices in real processes, one of which is killed: the run goes on to the same rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated import faults
from benchmarks.emulated.cases import Bench, cases, jitter
from flowtrain.emulate.run import packs_of
from flowtrain.errors import EXIT_DONE, LostProcessError


@dataclass(frozen=True, slots=True)
class Round:
    """A run whose device is killed, and the one that goes on; `libraries`: all that processes of devices ever had
    mapped, by pid."""

    bench: Bench
    found: dict[str, Any]
    libraries: dict[int, str]


@contextmanager
def watched(libraries: dict[int, str]) -> Iterator[None]:
    """Look at the processes of devices as long as this is open."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            for pid in faults.device_processes():
                maps = Path(f"/proc/{pid}/maps")
                seen = maps.read_text(encoding="utf-8") if maps.exists() else ""
                libraries[pid] = libraries.get(pid, "") + seen  # the last look may fall on a process that ends

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Round:
    bench = Bench(cases()["7b sft_8k frozen"], tmp_path_factory.mktemp("emulated"), jitter(), seed=0)
    libraries: dict[int, str] = {}
    with watched(libraries):
        found = faults.round_of(bench, 1, after=0.5, step=2)
    return Round(bench, found, libraries)


def test_a_killed_process_ends_the_run(killed: Round) -> None:
    found = killed.found
    assert found["exit"] == LostProcessError.exit_code, found
    assert found["role"] in ("producer", "consumer", "reader"), found
    assert found["noticed s"] < faults.NOTICE_SECONDS
    assert found["left"] == 0


def test_no_row_is_lost_or_trained_twice(killed: Round) -> None:
    config, emulation = faults.setup(killed.bench)
    assert killed.found["resumed exit"] == EXIT_DONE, killed.found
    assert packs_of(config.run.dir) == faults.composed(config, emulation)
    assert killed.found["ok"], killed.found


def test_two_dozen_devices_have_no_torch(killed: Round) -> None:
    config, emulation = faults.setup(killed.bench)
    plan = emulation.plan(config)
    assert len(plan.producers.ranks) + len(plan.consumers.ranks) == emulation.num_devices >= 24
    assert 6 <= len(killed.libraries) <= 10
    assert all("_raylet" in maps for maps in killed.libraries.values() if maps)
    assert not [pid for pid, maps in killed.libraries.items() if "libtorch" in maps]
