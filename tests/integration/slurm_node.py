"""A Slurm of one node on loopback, with a folder, a key and ports of its own; as root, from Debian's packages.

munged ◀── slurmctld ──▶ slurmd ──▶ slurmstepd ──▶ the job's script ──srun──▶ its steps
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest
from busy import allowed
from launched import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CPUS = 4
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
FirstJobId={first}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root here"


class Slurm:
    """Runs while its block is open; what a job has left is ended with it."""

    def __init__(self, folder: Path) -> None:
        if reason := why_not():
            pytest.skip(reason)
        self._folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        with (
            closing(socket.create_server(("127.0.0.1", 0))) as one,
            closing(socket.create_server(("127.0.0.1", 0))) as two,
        ):
            ports = [free.getsockname()[1] for free in (one, two)]
        first = 10_000 + secrets.randbelow(50_000)  # the script makes port and folder of it
        text = CONFIGURATION.format(host=socket.gethostname(), ports=ports, folder=folder, cpus=CPUS, first=first)
        (folder / "slurm.conf").write_text(text)
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._sweep)
            files = {"key-file": "key", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
            munge = self._folder / "munge.socket"
            options = [f"--{option}={self._folder / name}" for option, name in files.items()]
            self._start(stack, ["munged", "--foreground", "--force", f"--socket={munge}", *options])
            until(munge.is_socket, "munge's socket", allowed(20))
            self._start(stack, ["slurmctld", "-D"])
            self._start(stack, ["slurmd", "-D"])
            until(lambda: self.ask("sinfo", "--noheader", "--format=%T").strip() == "idle", "the node", allowed(30))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack, command: Sequence[str]) -> None:
        log = stack.enter_context((self._folder / f"{command[0]}.out").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        stack.callback(self._end, process)

    def _end(self, daemon: subprocess.Popen[bytes]) -> None:
        daemon.terminate()
        try:
            daemon.wait(timeout=allowed(20))
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=20)

    def _sweep(self) -> None:
        """A job that was not over outlives the daemons: its steps are no children of theirs."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def ask(self, *command: str) -> str:
        """What one of Slurm's programs says; empty while it fails."""
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=60)
        return done.stdout

    def submit(self, log: Path, options: Sequence[str], script: Path, *arguments: str, **variables: str) -> int:
        command = ["sbatch", "--parsable", f"--output={log}", *options, str(script), *arguments]
        environment = {**self._environment, **variables}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol` tells of it, such as JobState, ExitCode (`143:0`) and RunTime."""
        words = self.ask("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def seconds(self, job: int) -> int:
        """For how long it runs."""
        hours, minutes, seconds = map(int, self.job(job)["RunTime"].split(":"))
        return 3600 * hours + 60 * minutes + seconds

    def processes(self, job: int | None = None) -> list[psutil.Process]:
        """Of a job of this Slurm, or all that have its configuration, by their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            of = environment.get("SLURM_JOB_ID")
            ours = environment.get("SLURM_CONF") == self._environment["SLURM_CONF"]
            if ours and (job is None or of == str(job)):
                found.append(process)
        return found
