"""deploy/slurm/flowtrain.sbatch under a real Slurm: jobs that share a node, one to its end, one to its time limit."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

import pytest
from busy import allowed
from integration_runs import EXAMPLES, lines
from launched import SMALL, until
from slurm_node import Slurm

SCRIPT = EXAMPLES.parent / "deploy/slurm/flowtrain.sbatch"
SECONDS = 120
WARNING_SECONDS = 20
"""Before the time limit; Slurm looks every 30 s, and so warns up to 30 s earlier."""


def submit(slurm: Slurm, run_dir: Path, *overrides: str, options: tuple[str, ...] = ()) -> int:
    given = [word for value in (*SMALL, f"run.dir={run_dir}", *overrides) for word in ("--set", value)]
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(EXAMPLES.parent),
        "FLOWTRAIN_HEAD_IP": "127.0.0.1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray stays on loopback
    }
    log = run_dir.with_suffix(".log")
    return slurm.submit(
        log, ("--cpus-per-task=2", *options), SCRIPT, str(EXAMPLES / "digits/digits.yaml"), *given, **variables
    )


def ended(slurm: Slurm, job: int, run_dir: Path) -> tuple[str, str]:
    """State and exit code of a job that has left nothing behind."""

    def over() -> bool:
        return slurm.job(job).get("JobState") not in (None, "PENDING", "RUNNING", "COMPLETING")

    until(over, f"the end of job {job}", allowed(SECONDS))
    until(lambda: not slurm.processes(job), f"no process of job {job}", allowed(20))
    assert not Path(f"/tmp/flowtrain-ray-{job}").exists()
    told = slurm.job(job)
    return told["JobState"], told["ExitCode"]


@pytest.mark.timeout(240)
def test_a_run_ends_by_itself_and_one_saves_before_its_time_limit(tmp_path: Path) -> None:
    limited, whole = tmp_path / "limited", tmp_path / "whole"
    slow = ("mode=monolithic", "debug.delays.consumer_pack_ms={0: 200}")
    with Slurm(tmp_path / "slurm") as slurm:
        one = submit(slurm, limited, *slow, options=("--time=30", f"--signal=B:TERM@{WARNING_SECONDS}"))

        def trained() -> bool:
            state = slurm.job(one).get("JobState")
            assert state in (None, "PENDING", "RUNNING"), limited.with_suffix(".log").read_text()
            metrics = limited / "metrics.jsonl"
            return metrics.exists() and metrics.read_text().count("\n") >= 2

        until(trained, "two steps", allowed(60))
        minutes = math.ceil((slurm.seconds(one) + WARNING_SECONDS + 15) / 60)
        slurm.ask("scontrol", "update", f"JobId={one}", f"TimeLimit={minutes}")
        other = submit(slurm, whole, "train.max_steps=3")
        assert ended(slurm, other, whole) == ("COMPLETED", "0:0"), whole.with_suffix(".log").read_text()
        assert [record["step"] for record in lines(whole / "metrics.jsonl")] == [1, 2, 3]
        assert ended(slurm, one, limited) == ("FAILED", "143:0"), limited.with_suffix(".log").read_text()
        said = limited.with_suffix(".log").read_text()
        last = lines(limited / "metrics.jsonl")[-1]["step"]
        assert f"terminated (SIGTERM); step-{last} is saved, go on with --resume {limited}" in said
        assert (limited / f"checkpoints/step-{last}/complete.json").is_file()
        assert re.search(r"head \S+ at 127\.0\.0\.1:\d+, 1 nodes", said)
