"""Runs that are told to stop, and runs that cannot go on: exit code, last line, and what is there afterwards."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration_runs import EXAMPLES
from launched import Launch
from PIL import Image

SLOW = ("debug.delays.consumer_pack_ms={0: 50}",)
HERE = ("mode=monolithic",)
"""Everything in the driver: starts in half the time, for what does not depend on processes."""


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / "run"


def newest(launch: Launch) -> int:
    return max(launch.checkpoints(), default=0)


def test_ctrl_c_while_starting(run_dir: Path) -> None:
    with Launch("digits", run_dir) as launch:
        launch.until(lambda: any("raylet" in process.name() for process in launch.processes()), "Ray to start")
        launch.signal(signal.SIGINT)
        assert launch.end(within=15) == 130, launch.err
        assert "SIGINT" in launch.last_line
        assert "Traceback" not in launch.err
        assert not launch.metrics()


def test_ctrl_c_finishes_the_step_and_saves(run_dir: Path) -> None:
    with Launch("digits", run_dir, *SLOW) as launch:
        launch.until_step(2)
        assert launch.stage("producer-0").nice() == launch.driver.nice(), "others go before the stages"
        launch.signal(signal.SIGINT)
        assert launch.end(within=15) == 130, launch.err
        last = launch.metrics()[-1]["step"]
        assert launch.checkpoints() == [last]
        assert launch.last_line == f"interrupted (SIGINT); step-{last} is saved, go on with --resume {run_dir}"
        assert f"stopping after step {last}" in launch.out


def test_sigterm_during_a_save(run_dir: Path) -> None:
    """Goes on from the checkpoint of the test before, saves each step, and is told to end while one is written."""
    with Launch("digits", run_dir, *HERE, *SLOW, "checkpoint.every=1", resume=resumable(run_dir)) as launch:
        before = newest(launch)
        launch.until(lambda: newest(launch) > before, "the first checkpoint")
        launch.processes()
        launch.until(lambda: list(run_dir.glob("checkpoints/step-*.tmp")), "a save to begin")
        launch.signal(signal.SIGTERM)
        assert launch.end(within=15) == 143, launch.err
        last = launch.metrics()[-1]["step"]
        assert newest(launch) == last
        assert launch.last_line == f"terminated (SIGTERM); step-{last} is saved, go on with --resume {run_dir}"
        assert not list(run_dir.glob("checkpoints/*.tmp"))
        assert [record["step"] for record in launch.metrics()] == list(range(1, last + 1))


def test_ctrl_c_twice_ends_at_once(run_dir: Path) -> None:
    """The step would take a minute, so nothing but the second signal can end the run in time."""
    overrides = ("debug.delays.consumer_pack_ms={0: 60000}",)
    with Launch("digits", run_dir, *overrides, resume=resumable(run_dir)) as launch:
        before = newest(launch)
        launch.until(lambda: "one sample" in launch.out, "training to begin")
        launch.until(lambda: consumer_is_in(launch, "train"), "a step to begin")
        launch.signal(signal.SIGINT)
        launch.until(lambda: "stopping after step" in launch.out, "the first to be told")
        launch.signal(signal.SIGINT)
        assert launch.end(within=5 + 3) == 130, "5 s for the driver, the rest for the sweep and this machine"
        assert "SIGINT" in launch.last_line
        assert newest(launch) == before


def resumable(run_dir: Path) -> str | None:
    return "latest" if list(run_dir.glob("checkpoints/step-*/complete.json")) else None


def consumer_is_in(launch: Launch, span: str) -> bool:
    file = launch.run_dir / "spans" / "consumer-0"
    return file.exists() and span.encode() in file.read_bytes()


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[Callable[[int, dict[str, Any]], None]], Path]:
    """`rows(change)` writes 64 rows of one picture each, after `change(number, row)`; returns the file."""

    def write(change: Callable[[int, dict[str, Any]], None]) -> Path:
        lines = []
        for number in range(64):
            content = io.BytesIO()
            Image.effect_noise((64, 64), 90).convert("RGB").save(content, "JPEG")
            (tmp_path / f"{number}.jpeg").write_bytes(content.getvalue())
            row = {
                "id": f"row-{number}",
                "images": [str(tmp_path / f"{number}.jpeg")],
                "messages": [
                    {"role": "user", "content": "<image>Which number?"},
                    {"role": "assistant", "content": str(number)},
                ],
            }
            change(number, row)
            lines.append(json.dumps(row))
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def tear_picture(number: int, row: dict[str, Any]) -> None:
    """The header tells a size, the end is missing: only the producer, which decodes it, can notice."""
    if number == 7:
        path = Path(row["images"][0])
        path.write_bytes(path.read_bytes()[:-300])


def test_a_broken_picture_ends_the_run_in_the_producer(rows: Any, tmp_path: Path) -> None:
    file = rows(tear_picture)
    overrides = (f"data.train={file}", "data.on_bad_sample=error", "train.max_steps=8")
    with Launch("digits", tmp_path / "run", *overrides) as launch:
        launch.until(lambda: "one sample" in launch.out or launch.launcher.poll() is not None, "training to begin")
        assert launch.end(within=60) == 3, launch.err
        assert launch.last_line.startswith("row row-7: "), launch.err
        assert "image-undecodable" in launch.last_line
        assert "data.on_bad_sample: skip" in launch.last_line
        assert "7.jpeg" in launch.last_line
        assert "Traceback" not in launch.err


@pytest.fixture
def colocated_plan(tmp_path: Path) -> Path:
    """A plan file with everything in one process, as `flowtrain plan` writes it."""
    command = [sys.executable, "-m", "flowtrain.cli.main", "plan", str(EXAMPLES / "digits/digits.yaml")]
    command += ["--device", "cpu", "--devices-per-node", "1", "--placement", "colocated"]
    subprocess.run([*command, "--out", str(tmp_path / "plan.yaml")], capture_output=True, timeout=60, check=True)
    return tmp_path / "plan.yaml"


def test_a_broken_picture_is_skipped_and_counted(rows: Any, tmp_path: Path, colocated_plan: Path) -> None:
    """In a run that obeys a plan file: without it, the two sides would be processes of their own."""
    overrides = (f"data.train={rows(tear_picture)}", "train.max_steps=null", "train.epochs=1")
    with Launch("digits", tmp_path / "run", *overrides, plan=colocated_plan) as launch:
        assert launch.end(within=90) == 0, launch.err
        assert yaml.safe_load((tmp_path / "run/plan.yaml").read_text())["placement"] == "colocated"
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert summary["rows"]["skipped"] == {"image-undecodable": {"count": 1, "ids": ["row-7"]}}, summary
        lines = (tmp_path / "run/samples.jsonl").read_text().splitlines()
        ids = [row for line in lines for row in json.loads(line)["ids"]]
        assert sorted(ids) == sorted(f"row-{number}" for number in range(64) if number != 7)
        assert sum(record["rows"] for record in launch.metrics()) == 63


def test_rows_without_an_answer_end_the_run(rows: Any, tmp_path: Path) -> None:
    def mute(number: int, row: dict[str, Any]) -> None:
        row["messages"] = row["messages"][:1]

    with Launch("digits", tmp_path / "run", *HERE, f"data.train={rows(mute)}") as launch:
        assert launch.end(within=90) == 3, launch.err
        assert "64 of the first 64 rows" in launch.last_line, launch.err
        assert "no-trained-token" in launch.last_line
        assert "flowtrain data check" in launch.last_line


# --- refused before anything starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        pytest.param(
            ("producers.num=40", "cluster.oversubscribe=false"), 4, ("cluster.oversubscribe", "40"), id="processes"
        ),
        pytest.param(("pool.bytes=64KiB",), 4, ("pool.bytes", "65536"), id="pool"),
        pytest.param(("data.train=absent.jsonl",), 2, ("data.train", "absent.jsonl", "not exist"), id="no-data"),
        pytest.param(("model.path=absent",), 2, ("absent",), id="no-model"),
        pytest.param(("train.lr=fast",), 2, ("train.lr",), id="config"),
    ],
)
def test_refused_at_once(tmp_path: Path, overrides: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    with Launch("digits", tmp_path / "run", *overrides) as launch:
        assert launch.end(within=30) == code, launch.err
        assert all(word in launch.last_line for word in words), launch.err
        assert "Traceback" not in launch.err


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(file_system: Callable[[str], Path]) -> Path:
    return file_system("16m")


def test_a_full_disk_at_a_save(small_disk: Path) -> None:
    """The weights of the start fit, a checkpoint with optimizer states beside them does not."""
    run_dir = small_disk / "run"
    with Launch("digits", run_dir, *HERE, "checkpoint.every=2") as launch:
        assert launch.end(within=90) == 4, launch.err
        assert f"cannot write {run_dir}/checkpoints/step-2.tmp" in launch.last_line, launch.err
        assert "No space left" in launch.last_line
        assert "run.dir" in launch.last_line
        assert not launch.checkpoints()
