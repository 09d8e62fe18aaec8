"""The run's folder: one live run, earlier ones aside, and the checkpoint to go on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowtrain.cli.resume import find_checkpoint, set_newer_aside
from flowtrain.cli.rundir import ENDING_SECONDS, check_place, open_run_dir, writing
from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.running import LOCK_FILE

HOLD = """
import os, subprocess, sys
from pathlib import Path
from flowtrain.cli.rundir import open_run_dir
run = open_run_dir(Path(sys.argv[1]), keep=True)
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, "-c", sys.argv[2]], pass_fds=[run.lock])
print("locked", flush=True)
sys.stdin.read()
"""


def hold(path: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def test_a_new_folder_is_made_and_locked(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "a/b")
    try:
        assert run.notes == ()
        assert json.loads((tmp_path / "a/b" / LOCK_FILE).read_text())["pid"] == os.getpid()
    finally:
        run.close()


def test_a_place_for_a_result_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "new", Path("/dev/null")):
        check_place(path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "mine")]
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "a/b", "No such file"), (tmp_path / "file/b", "Not a")):
        with pytest.raises(ConfigError, match=rf"cannot be written: {why}.*choose a place that you may write to"):
            check_place(path)


def test_earlier_runs_are_moved_aside_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for count in range(3):
        run = open_run_dir(path)
        (path / "config.yaml").write_text(str(count))
        run.close()
        assert len(run.notes) == (count > 0)
    assert (tmp_path / "run.old-1/config.yaml").read_text() == "0"
    assert (tmp_path / "run.old-2/config.yaml").read_text() == "1"
    assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", LOCK_FILE]


def test_keep_goes_on_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x")
    run = open_run_dir(tmp_path, keep=True)
    run.close()
    assert (tmp_path / "config.yaml").exists()
    assert run.notes == ()


def test_a_folder_that_no_run_wrote_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"no run wrote \(thesis.tex\)"):
        open_run_dir(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_with_what_the_run_reads_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x")
    with pytest.raises(ConfigError, match="which this run reads"):
        open_run_dir(tmp_path, inputs=[tmp_path / "export"])
    open_run_dir(tmp_path, inputs=[tmp_path.with_name(tmp_path.name + "-else")]).close()


def test_a_live_run_is_refused_at_once_and_untouched(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    (tmp_path / "config.yaml").write_text("x")
    try:
        start = time.monotonic()
        for keep in (False, True):
            with pytest.raises(ConfigError, match=rf"alive \(process {holder.pid}\)"):
                open_run_dir(tmp_path, keep=keep)
        assert time.monotonic() - start < ENDING_SECONDS, "it waited, as for a run that is about to end"
        assert (tmp_path / "config.yaml").exists()
    finally:
        end(holder)
    open_run_dir(tmp_path, keep=True).close()


def test_a_run_whose_launcher_was_killed_is_waited_for(tmp_path: Path) -> None:
    """Its driver, which inherited the lock, needs a moment to end: here until its stdin is closed."""
    holder = hold(tmp_path, "import sys; sys.stdin.read()")
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.kill()
    holder.wait(timeout=10)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(open_run_dir, tmp_path, keep=True)
        try:
            with pytest.raises(TimeoutError):
                opening.result(timeout=0.5)
        finally:
            holder.stdin.close()
        opening.result(timeout=10).close()
    holder.stdout.close()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run_dir(tmp_path / "file/run")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run_dir(tmp_path / "file")


def test_a_full_disk_is_no_fault_of_the_config() -> None:
    full = Path("/dev/full")
    with pytest.raises(PlanError, match="No space left"), writing(full):
        full.write_text("x" * 10_000)


Checkpoint = Callable[[int], Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    def make(step: int) -> Path:
        folder = tmp_path / f"run/checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        size = (folder / "state.json").stat().st_size
        (folder / "complete.json").write_text(json.dumps({"step": step, "files": {"state.json": size}}))
        return folder

    return make


@pytest.mark.parametrize("resume", ["latest", "RUN"])
def test_the_last_complete_checkpoint_is_chosen(tmp_path: Path, checkpoint: Checkpoint, resume: str) -> None:
    for step in (2, 10):
        checkpoint(step)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/step-12.tmp").mkdir()
    (run_dir / "checkpoints/step-11").mkdir()
    found = find_checkpoint(run_dir, resume.replace("RUN", str(run_dir)))
    assert (found.run_dir, found.checkpoint.name) == (run_dir, "step-10")
    assert [note.split("/")[-1] for note in found.notes] == [
        "step-12.tmp: half written",
        "step-11: half written",
        "step-10",
    ]


def test_one_checkpoint_may_be_named_and_later_ones_are_set_aside(tmp_path: Path, checkpoint: Checkpoint) -> None:
    for step in (2, 4, 6):
        checkpoint(step)
    found = find_checkpoint(tmp_path / "elsewhere", str(tmp_path / "run/checkpoints/step-2"))
    assert found.run_dir == tmp_path / "run"
    assert len(list(set_newer_aside(found))) == 2
    names = sorted(entry.name for entry in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-2", "step-4.old-1", "step-6.old-1"]
    assert find_checkpoint(tmp_path / "run", "latest").checkpoint.name == "step-2"


def test_what_cannot_be_resumed_is_told(tmp_path: Path, checkpoint: Checkpoint) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="does not exist; there is no run"):
        find_checkpoint(run_dir, "latest")
    half = run_dir / "checkpoints/step-3"
    half.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no complete checkpoint .1 half written.; start without"):
        find_checkpoint(run_dir, "latest")
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        find_checkpoint(run_dir, str(half))
    half.rename(half.with_suffix(".tmp"))
    with pytest.raises(ConfigError, match="half written"):
        find_checkpoint(run_dir, str(half.with_suffix(".tmp")))


def test_an_earlier_run_with_a_checkpoint_is_pointed_to(tmp_path: Path, checkpoint: Checkpoint) -> None:
    checkpoint(3)
    (tmp_path / "run").rename(tmp_path / "run.old-1")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"an earlier run has one: --resume .*run.old-1"):
        find_checkpoint(tmp_path / "run", "latest")
