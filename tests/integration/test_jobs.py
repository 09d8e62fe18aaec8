"""Runs as jobs of a cluster of four nodes, each with an address of its own where network namespaces may be made.

One cluster for all of it, in a process of its own; the tests that kill nodes come last. A job that needs no other node
runs in one process (`mode: monolithic`), which starts in half the time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from busy import allowed
from integration_runs import EXAMPLES, Train, lines, losses
from launched import until

from flowtrain.pool.transport.nixl_agent import why_missing

HERE = Path(__file__).parent
TOKEN = "integration-tests-0123456789abcdef"
TRANSPORT = "ray" if why_missing() else "nixl"
SECONDS = 120
COMMON = (
    "train.step={samples: 6}",
    "train.epochs=null",
    "data.eval=null",
    "checkpoint.export=false",
    "telemetry.progress=plain",
)
ACROSS = (
    "producers.threads=1",
    "consumers.threads=1",
    "producers.node=1",
    "consumers.node=0",
    f"pool.transport={TRANSPORT}",
)
ONE_PROCESS = ("mode=monolithic", "train.max_steps=500")
SLOW = ("debug.delays.consumer_pack_ms={0: 300}",)


@dataclass
class Nodes:
    """The cluster; `prefix`: what a command stands behind, so that it reaches the dashboard; `local`: a folder with
    other contents on each node, where they have addresses of their own."""

    dashboard: str
    prefix: list[str]
    environment: dict[str, str]
    control: subprocess.Popen[str]
    local: Path

    def kill(self, node: int) -> None:
        stdin, stdout = self.control.stdin, self.control.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"kill {node}\n")
        stdin.flush()
        assert stdout.readline() == "done\n"

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**self.environment, **environment},
        )

    def command(self, *arguments: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "flowtrain.cli.main", *arguments, "--address", self.dashboard]


def can_make_namespaces() -> bool:
    name = f"ft-probe{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=20, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
    return made


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four nodes of two cores; token authentication as a cluster has it; a home folder that holds no token."""
    home = tmp_path_factory.mktemp("home")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "HOME": str(home), "PATH": path}
    environment = {**os.environ, **variables, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "ray_nodes.py"), "4", "2"]
    local = tmp_path_factory.mktemp("local")
    command += [str(local)] if can_make_namespaces() else []
    with (home / "err").open("w") as err:
        control = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, env=environment
        )
    try:
        assert control.stdout is not None
        told = json.loads(control.stdout.readline() or "null")
        assert told, (home / "err").read_text()
        prefix = ["ip", "netns", "exec", told["namespaces"][0]] if told["namespaces"] else []
        yield Nodes(told["dashboard"], prefix, environment, control, local)
    finally:
        assert control.stdin is not None
        control.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            control.wait(timeout=30)
        control.kill()
        assert control.stdout is not None
        control.stdout.close()
        control.wait(timeout=10)


class Launch:
    """`flowtrain launch` of the emoji example as a job, watched from outside."""

    def __init__(self, nodes: Nodes, run_dir: Path, *overrides: str, options: Sequence[str] = ()) -> None:
        self.nodes, self.run_dir = nodes, run_dir
        command = nodes.command("launch", str(EXAMPLES / "emoji/emoji.yaml"), *options)
        for override in (*COMMON, f"run.dir={run_dir}", *overrides):
            command += ["--set", override]
        self._files: dict[str, Path] = {name: run_dir.with_name(f"{run_dir.name}.{name}") for name in ("out", "err")}
        with self._open("out") as out, self._open("err") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=nodes.environment)

    def _open(self, name: str) -> IO[str]:
        return self._files[name].open("w")

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait(timeout=20)

    def text(self, name: str) -> str:
        return self._files[name].read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.text("err").splitlines()[-1]

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, f"ended too soon: {self.text('out')}\n{self.text('err')}"
            return step <= len(records(self.run_dir))

        until(reached, f"step {step} of a job", SECONDS)

    def end(self, within: float) -> int:
        """The exit code, in seconds of a machine that does nothing else."""
        return self.process.wait(timeout=allowed(within))


def records(run_dir: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return lines(run_dir / "metrics.jsonl")
    return []


def of_run(run_dir: Path) -> list[str]:
    """Processes of a run: what has its folder in the command line, or its file of spans open."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            words = " ".join(process.cmdline())
            if f"{run_dir}/spans/" in maps or f"runtime.driver --config {run_dir}/" in words:
                found.append(f"{process.pid} {words[:80]}")
    return found


def assert_nothing_left(run_dir: Path) -> None:
    until(lambda: not of_run(run_dir), f"no process of {run_dir}", allowed(10))


@pytest.mark.timeout(300)
def test_a_job_that_is_interrupted_and_resumed_equals_a_local_run(nodes: Nodes, train: Train, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "job", 6
    overrides = (*ACROSS, f"train.max_steps={steps}")
    with Launch(nodes, run_dir, *overrides, *SLOW) as launch:
        launch.until_step(2)
        launch.process.send_signal(signal.SIGINT)
        assert launch.end(within=30) == 130, launch.text("err")
        interrupted = len(records(run_dir))
        assert 2 <= interrupted < steps
        assert launch.last_line == stopped_at(interrupted, run_dir)
        assert "finishes its step and saves, within 25 s" in launch.text("err")
        assert f"step 1/{steps} " in launch.text("out")
        assert "flowtrain-job-end" not in launch.text("out")
    assert_nothing_left(run_dir)
    with Launch(nodes, run_dir, *overrides, options=("--resume", "latest", "--no-wait")) as launch:
        assert launch.end(within=30) == 0, launch.text("err")
        job = launch.text("out").strip()
    assert re.fullmatch(r"\w+", job)
    followed = nodes.cli("jobs", "logs", job, "--follow")
    assert followed.returncode == 0, followed.stderr
    assert f"done: {steps} steps" in followed.stdout
    assert_nothing_left(run_dir)
    here = train(
        "emoji", *COMMON, "producers.threads=1", "consumers.threads=1", f"train.max_steps={steps}", name="local"
    )
    assert losses(run_dir) == losses(here)
    assert all(record[f"pool/bytes_out/{TRANSPORT}"] == record["pool/bytes_out"] > 0 for record in records(run_dir))
    placed = {(row["role"], row["ranks"]): row for row in json.loads((run_dir / "placement.json").read_text())}
    assert [placed[role, "0"]["node"] for role in ("producer", "consumer")] == [1, 0]
    if nodes.prefix:
        assert placed["producer", "0"]["address"] == "10.78.0.2"


def stopped_at(step: int, run_dir: Path) -> str:
    """The last line of a run that was stopped in order."""
    assert (run_dir / f"checkpoints/step-{step}/complete.json").is_file()
    return f"interrupted (SIGINT); step-{step} is saved, go on with --resume {run_dir}"


@pytest.mark.timeout(300)
def test_jobs_side_by_side_end_as_their_runs_do(nodes: Nodes, tmp_path: Path) -> None:
    """One is stopped by its id; of the others one cannot read its rows, one has nothing to go on with, one lacks its
    model, and one has a run.dir that is another folder on each node."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "messages": \n')
    jobs: dict[Path, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
        tmp_path / "rows": ((*ONE_PROCESS, f"data.train={rows}"), 3, ("rows.jsonl",)),
        tmp_path / "resumed": (ONE_PROCESS, 2, ("does not exist", "no run to go on with")),
        tmp_path / "hidden": (("model.path=/absent/model",), 4, ("node ", "/absent/model", "same path")),
    }
    if nodes.prefix:  # only then folders differ
        run_dir = nodes.local / "run"
        told = (
            f"node 1 (10.78.0.2) does not have {run_dir}/decisions.jsonl",
            "run.dir on storage that all nodes share",
        )
        jobs[run_dir] = ((*ACROSS, "train.max_steps=2"), 4, told)
    with ExitStack() as stack:
        stopped = stack.enter_context(Launch(nodes, tmp_path / "stopped", *ONE_PROCESS, *SLOW))
        launches = {
            run_dir: stack.enter_context(
                Launch(nodes, run_dir, *overrides, options=("--resume", "latest") if run_dir.name == "resumed" else ())
            )
            for run_dir, (overrides, _, _) in jobs.items()
        }
        for run_dir, (_, code, words) in jobs.items():
            launch = launches[run_dir]
            assert launch.end(within=90) == code, launch.text("err")
            assert all(word in launch.last_line for word in words), launch.last_line
            assert "Traceback" not in launch.text("err")
        stopped.until_step(2)
        (job,) = re.findall(r"^job (\w+) on http", stopped.text("err"), re.MULTILINE)
        last_line = nodes.cli("jobs", "stop", job).stderr.splitlines()[-1]
        assert last_line == stopped_at(len(records(stopped.run_dir)), stopped.run_dir)
        assert stopped.end(within=10) == 130, "the one who follows it is told, too"
        assert stopped.last_line == last_line
    assert nodes.cli("jobs", "logs", job).stdout.splitlines()[-1] == last_line
    listed = tmp_path / "jobs.json"
    assert nodes.cli("jobs", "list", "--json", str(listed)).returncode == 0
    assert job in [one["id"] for one in json.loads(listed.read_text())["jobs"]]
    assert_nothing_left(stopped.run_dir)


def test_a_config_that_is_wrong_is_no_job(nodes: Nodes, tmp_path: Path) -> None:
    with Launch(nodes, tmp_path / "run", "train.lr=fast") as launch:
        assert launch.end(within=20) == 2, launch.text("err")
        assert "train.lr" in launch.last_line


@pytest.mark.parametrize("token", ["", "another-token-0123456789abcdef01"])
def test_a_user_without_the_token_is_refused(nodes: Nodes, token: str) -> None:
    refused = nodes.cli("jobs", "list", RAY_AUTH_TOKEN=token)
    assert refused.returncode == 4
    assert "RAY_AUTH_TOKEN_PATH" in refused.stderr.splitlines()[-1]


def test_the_doctor_sees_every_node_by_a_job(nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    config = str(EXAMPLES / "emoji/emoji.yaml")
    run_dir = f"run.dir={tmp_path / 'run'}"
    taken = ["--set", "telemetry.sinks=[prometheus]", "--set", "telemetry.prometheus_host=203.0.113.9"]
    ended = nodes.cli("doctor", config, "--set", run_dir, *taken, "--no-bench", "--json", str(file))
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("doctor: 1 thing on 4 nodes would end a run")
    assert "wrong: ports, node 0" in ended.stdout
    found = json.loads(file.read_text())
    assert [node["number"] for node in found["nodes"]] == [0, 1, 2, 3]
    assert len({node["code"] for node in found["nodes"]}) == 1
    assert all(sight["bytes"] is not None for node in found["nodes"] for sight in node["seen"])
    assert [(pair["owner"], pair["reader"], pair["refused"]) for pair in found["pairs"]] == [
        (owner, reader, None) for owner in range(4) for reader in range(owner + 1, 4)
    ]
    assert sorted(os.listdir(tmp_path)) == ["doctor.json"], "the file by which nodes see run.dir is gone"


# --- nodes die: nothing comes behind these ----------------------------------------------------------------------------


@pytest.mark.timeout(200)
def test_a_killed_node_ends_the_job_with_5(nodes: Nodes, tmp_path: Path) -> None:
    """Each process has a node of its own, as many producers as have room; the node of one, from which consumers read,
    dies."""
    run_dir = tmp_path / "run"
    sides = ("producers.num=null", "consumers.num=2", "producers.threads=2", "consumers.threads=2")
    with Launch(nodes, run_dir, *sides, "train.max_steps=500", f"pool.transport={TRANSPORT}") as launch:
        launch.until_step(2)
        placed = json.loads((run_dir / "placement.json").read_text())
        assert sorted(row["node"] for row in placed if row["role"] != "reader") == [0, 1, 2, 3]
        nodes.kill(3)
        assert launch.end(within=30) == 5, launch.text("err")
        assert re.match(r"(producer|consumer) 1 \(pid \d+\) died", launch.last_line), launch.last_line
        assert "--resume" in launch.last_line
    assert_nothing_left(run_dir)


def test_a_killed_head_is_told_to_who_follows(nodes: Nodes, tmp_path: Path) -> None:
    """The launcher leaves the job at the second Ctrl-C: the step that it is to finish takes a minute."""
    run_dir = tmp_path / "run"
    with Launch(nodes, run_dir, *ONE_PROCESS, "debug.delays.consumer_pack_ms={0: 60000}") as launch:
        until(lambda: in_span(run_dir, b"train"), "a step to begin", SECONDS)
        launch.process.send_signal(signal.SIGINT)
        until(lambda: "asking job" in launch.text("err"), "the first to be told", allowed(10))
        launch.process.send_signal(signal.SIGINT)
        assert launch.end(within=5) == 130, launch.text("err")
        left = re.match(r"left job (\w+), which ends by itself", launch.last_line)
        assert left is not None, launch.last_line
    assert of_run(run_dir), "it goes on"
    command = nodes.command("jobs", "logs", left[1], "--follow")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=nodes.environment
    ) as follower:
        assert follower.stdout is not None
        next(line for line in follower.stdout if "one sample" in line)
        nodes.kill(0)
        assert_nothing_left(run_dir)
        _, err = follower.communicate(timeout=allowed(30))
    assert follower.returncode == 5, err
    assert "has not answered for 15 s" in err.splitlines()[-1]


def in_span(run_dir: Path, name: bytes) -> bool:
    """Whether a process of the run is at this."""
    return any(name in file.read_bytes() for file in run_dir.glob("spans/*"))
