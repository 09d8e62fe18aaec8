"""However a process of a run dies, the run ends soon, says who it was, leaves nothing, and can be gone on with (C9).

Tests with `run_dir` share one run: each goes on from the last complete checkpoint of the one before, as a user would.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from busy import allowed
from launched import Launch, until
from safetensors.torch import save_file
from tiny_families import make_family

SLOW = ("checkpoint.every=2", "debug.delays.consumer_pack_ms={0: 50}")

ENDS_IN_SECONDS = 15.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside it is the model, which has experts, so that every letter of a layout has something to cut."""
    folder = tmp_path_factory.mktemp("crash")
    make_family("qwen3_vl_moe", folder / "model")
    return folder / "run"


@contextmanager
def running(run_dir: Path, *overrides: str) -> Iterator[Launch]:
    """The run, started or gone on with, once it has written another checkpoint."""
    whole = sorted(run_dir.glob("checkpoints/step-*/complete.json"))
    overrides = (f"model.path={run_dir.parent / 'model'}", *SLOW, *overrides)
    with Launch("digits", run_dir, *overrides, resume="latest" if whole else None) as launch:
        begun = max(launch.checkpoints(), default=0)
        launch.until(lambda: max(launch.checkpoints(), default=0) > begun, "a new checkpoint")
        launch.processes()
        yield launch


@contextmanager
def starting(run_dir: Path) -> Iterator[tuple[Launch, psutil.Process]]:
    """A run whose stages are being started, and one of their processes."""
    with Launch("digits", run_dir) as launch:
        launch.until(lambda: launch.titled("StageActor"), "the first stage's process")
        yield launch, launch.titled("StageActor")[0]


@pytest.mark.parametrize(
    ("victim", "layouts"),
    [
        ("producer 0", ()),
        ("producer 1", ("producers.layout=f2", "consumers.layout=c2")),
        ("consumer 1", ("producers.layout=r2", "consumers.layout=f2e2")),
        ("consumer 0", ("producers.layout=r1", "consumers.layout=t2", "pool.transport=ray")),
        ("consumer 0", ("producers.layout=t2", "consumers.layout=p2", "pool.transport=ray")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "r1",
)
def test_a_killed_stage_ends_the_run(run_dir: Path, victim: str, layouts: tuple[str, ...]) -> None:
    """Every run goes on from the checkpoint of the one before, also of another layout. Over Ray's store one of two
    consumers makes copies, which the other sees (t2) or has no use for (p2): it is the one that is killed."""
    with running(run_dir, *layouts) as launch:
        stage = launch.stage(victim.replace(" ", "-"))
        launch.kill(stage)
        assert launch.end(within=ENDS_IN_SECONDS) == 5, launch.err
        assert launch.last_line.startswith(f"{victim} (pid {stage.pid}) died "), launch.err
        assert "--resume" in launch.last_line
        assert "Traceback" not in launch.err
        steps = [record["step"] for record in launch.metrics()]
        assert steps == list(range(1, steps[-1] + 1)), "a record is lost or twice"
        assert json.loads((run_dir / "summary.json").read_text())["exit"] == 5


def test_a_stage_killed_while_starting_ends_the_run(tmp_path: Path) -> None:
    with starting(tmp_path / "run") as (launch, stage):
        launch.kill(stage)
        assert launch.end(within=ENDS_IN_SECONDS) == 5, launch.err
        assert re.match(rf"(reader|producer|consumer) 0 (\(pid {stage.pid}\) )?died ", launch.last_line), launch.err


def test_a_killed_driver_is_named_by_the_launcher(tmp_path: Path) -> None:
    with starting(tmp_path / "run") as (launch, _):
        launch.kill(launch.driver)
        assert launch.end(within=ENDS_IN_SECONDS) == 5, launch.err
        assert "driver" in launch.last_line, launch.err
        assert "SIGKILL" in launch.last_line
        assert str(tmp_path / "run") in launch.last_line


def test_a_killed_launcher_takes_the_run_along(tmp_path: Path) -> None:
    with starting(tmp_path / "run") as (launch, _):
        launch.kill(psutil.Process(launch.launcher.pid))
        assert launch.launcher.wait(timeout=allowed(10)) == -signal.SIGKILL
        launch.assert_gone(within=10)


def test_killed_launcher_and_driver_take_the_run_along(run_dir: Path) -> None:
    """The stages notice by themselves, and take Ray's agents along, which would stay for another minute."""
    with running(run_dir) as launch:
        launch.kill(launch.driver, psutil.Process(launch.launcher.pid))
        assert launch.launcher.wait(timeout=allowed(10)) == -signal.SIGKILL
        launch.assert_gone(within=10)


def test_a_stage_that_hangs_is_named(run_dir: Path) -> None:
    with running(run_dir, "run.timeout_seconds=5") as launch:
        stage = launch.stage("producer-0")
        launch.processes()
        stage.suspend()
        hung = time.monotonic()
        assert launch.end(within=5 + ENDS_IN_SECONDS) == 5, launch.err
        assert time.monotonic() - hung >= 5
        assert "no process answered for 5 s" in launch.last_line, launch.err
        assert "producer 0" in launch.last_line
        assert "run.timeout_seconds" in launch.last_line


def test_the_run_can_be_gone_on_with_to_its_end(run_dir: Path) -> None:
    """After all that, in one process: every step is there once, and a line names the checkpoint passed over.

    What an export that was cut short has left, of a pipeline with more stages, is in nobody's way.
    """
    whole = sorted(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step-*/complete.json"))
    last = max(whole, default=0)
    torn = run_dir / "checkpoints" / f"step-{last + 1}"
    torn.mkdir(parents=True, exist_ok=True)
    (torn / "state.json").write_text("{}")
    parts = run_dir / "export.tmp/parts"
    parts.mkdir(parents=True)
    save_file({"model.language_model.norm.weight": torch.ones(8)}, parts / "consumer-3-0.safetensors")
    overrides = (
        f"model.path={run_dir.parent / 'model'}",
        "mode=monolithic",
        f"train.max_steps={last + 3}",
        "checkpoint.every=2",
        "checkpoint.export=true",
    )
    with Launch("digits", run_dir, *overrides, resume="latest" if whole else None) as launch:
        assert launch.launcher.wait(timeout=120) == 0, launch.err
        launch.processes()
        assert [record["step"] for record in launch.metrics()] == list(range(1, last + 4))
        if whole:
            assert f"passed over {torn}: half written" in launch.err
        until(lambda: not launch.shared_left(), "/dev/shm to be as it was")
        assert (run_dir / "export/model.safetensors.index.json").is_file(), launch.err
        assert not parts.parent.exists()
