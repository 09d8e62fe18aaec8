"""Kill -9 of emulated devices at random moments: the run ends in order, and goes on to the same rows.

    launcher (supervise) ──▶ driver ──▶ processes of devices ◀── SIGKILL, at a moment drawn from the run's length

A round: run, kill, look at how it ended (contracts C9, C11), go on from the last checkpoint, compare what was trained
with what composition makes of the rows.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulated.cases import FLOW, Bench
from benchmarks.record import Check
from flowtrain.cli.outcome import Outcome, outcome_of
from flowtrain.cli.rundir import RunDir, open_run_dir
from flowtrain.cli.supervise import supervise
from flowtrain.config.loading import dump_resolved
from flowtrain.config.schema import Config
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.modelled import Modelled
from flowtrain.emulate.run import packs_of
from flowtrain.errors import EXIT_DONE, LostProcessError
from flowtrain.runtime.checkpoints import newest_complete
from flowtrain.telemetry.files import write_atomic

STEPS, SAVE_EVERY = 12, 3
STEP_SECONDS = 0.4
NOTICE_SECONDS = 15.0
"""Within which a lost process ends a run (C9)."""

NAMED = re.compile(r"(producer|consumer|reader) \d+ \(pid (\d+)\) died")


@dataclass(slots=True)
class Launched:
    """One launch: how it ended, and when a device was killed."""

    outcome: Outcome
    seconds: float
    killed: int | None = None
    killed_at: float | None = None

    @property
    def noticed_seconds(self) -> float | None:
        return None if self.killed_at is None else self.seconds - self.killed_at


def launch(
    config: Config,
    emulation: Emulation,
    resume: Path | None = None,
    kill_after: float | None = None,
    kill_step: int = 0,
) -> Launched:
    """A run in processes of its own, to its end. `kill_after`: seconds behind its first sign of life and its record of
    `kill_step`; then one of the processes that stand for devices is killed."""
    run_dir: RunDir = open_run_dir(config.run.dir, [], keep=resume is not None)
    write_atomic(run_dir.path / "config.yaml", dump_resolved(config))
    emulation.write(run_dir.path)
    argv = [sys.executable, "-m", "flowtrain.emulate.driver", "--config", str(run_dir.path / "config.yaml")]
    argv += ["--processes", "2"] + (["--resume", str(resume)] if resume is not None else [])
    run_id, start = uuid.uuid4().hex, time.monotonic()
    killer = None if kill_after is None else _Killer(kill_after, start, config.run.dir / "metrics.jsonl", kill_step)
    try:
        ended = supervise(argv, run_id, os.environ, 60.0, pass_fds=[run_dir.lock])
    finally:
        run_dir.close()
        if killer is not None:
            killer.join()
    found = Launched(outcome_of(ended, run_dir.path), time.monotonic() - start)
    if killer is not None:
        found.killed, found.killed_at = killer.pid, killer.at
    return found


class _Killer(threading.Thread):
    """Kills one process of devices, `after` seconds behind the first one's start and the record of a step."""

    def __init__(self, after: float, start: float, records: Path, step: int) -> None:
        super().__init__(daemon=True)
        self.after, self.start_time = after, start
        self.records, self.step = records, step
        self.pid: int | None = None
        self.at: float | None = None
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 120.0
        while not (device_processes() and self._recorded() >= self.step) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(self.after)
        found = device_processes()
        if found:
            self.pid = random.Random(self.after).choice(found)
            self.at = time.monotonic() - self.start_time
            os.kill(self.pid, signal.SIGKILL)

    def _recorded(self) -> int:
        return self.records.read_bytes().count(b"\n") if self.records.is_file() else 0


def device_processes() -> list[int]:
    """Those below this process."""
    return sorted(child.pid for child in psutil.Process().children(recursive=True) if "SharedActor" in _name(child))


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def setup(bench: Bench) -> tuple[Config, Emulation]:
    """A run of `STEPS` short steps that saves every `SAVE_EVERY`."""
    choices = bench.choices(FLOW)
    assert choices is not None
    scale = bench.scale_of(STEP_SECONDS)
    emulation = bench.case.emulation(choices, time_scale=scale, jitter=bench.jitter, seed=bench.seed)
    saves = {"every": SAVE_EVERY}
    return bench.case.config(emulation, FLOW, bench.rows, bench.folder / "faults", STEPS, checkpoint=saves), emulation


def composed(config: Config, emulation: Emulation) -> list[dict[str, Any]]:
    """Packs of a run that nobody disturbs, as samples.jsonl has them: they follow from rows, seed and config alone."""
    steps = islice(Modelled(config, emulation, emulation.plan(config), config.run.dir).steps(), STEPS)
    return [
        {"step": step.index, "rank": pack.rank, "pack": pack.slot, "ids": [sample.id for sample in pack.samples]}
        for step in steps
        for pack in step.packs
    ]


def round_of(bench: Bench, number: int, after: float | None = None, step: int = 0) -> dict[str, Any]:
    """One kill and what came of it. `after`: seconds behind the first sign of devices and the record of `step`, drawn
    by round where nothing is said."""
    config, emulation = setup(bench)
    expected = composed(config, emulation)
    before = set(os.listdir("/dev/shm"))
    if after is None:
        after = random.Random(f"{bench.seed} kill {number}").uniform(0.0, 2.0 + STEPS * STEP_SECONDS * 1.2)
    first = launch(config, emulation, kill_after=after, kill_step=step)
    line = first.outcome.line or ""
    named = NAMED.search(line)
    left = len(device_processes()) + len(set(os.listdir("/dev/shm")) - before)
    whole = newest_complete(config.run.dir).folder
    done = first.outcome.exit_code == EXIT_DONE  # it had nothing left to do when it was killed
    again = first if done else launch(config, emulation, resume=whole)
    trained = packs_of(config.run.dir)
    return {
        "case": "faults",
        "variant": f"round {number}",
        "killed after s": after,
        "role": named[1] if named else ("done before" if done else "starting"),
        "exit": first.outcome.exit_code,
        "line": line,
        "noticed s": first.noticed_seconds or 0.0,
        "left": left,
        "from step": 0 if whole is None else int(whole.name.removeprefix("step-")),
        "resumed exit": again.outcome.exit_code,
        "same packs": trained == expected,
        "rows": sum(len(pack["ids"]) for pack in trained),
        "ok": (done or first.outcome.exit_code == LostProcessError.exit_code)
        and (done or str(first.killed) in line)
        and not left
        and again.outcome.exit_code == EXIT_DONE
        and trained == expected,
    }


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Every round ended and went on as it has to."""
    return [
        Check(
            "rounds in which a killed device ended the run in order and the same rows were trained",
            sum(row["ok"] for row in rows),
            "==",
            len(rows),
        ),
        Check(
            "longest time from a kill to the end of all processes (s)",
            max(row["noticed s"] for row in rows),
            "<=",
            NOTICE_SECONDS,
        ),
        Check(
            "rounds that a process of devices did not survive",
            sum(row["exit"] != 0 for row in rows),
            ">=",
            len(rows) // 2,
        ),
    ]
