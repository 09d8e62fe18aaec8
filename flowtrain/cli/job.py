"""A run as a job of a Ray cluster: where a launch runs, what it sends, and how it is followed to its end (ADR 0019).

| `--address`, else `RAY_ADDRESS`, else `cluster.address` | outside | inside a Ray job or a Slurm allocation |
|---|---|---|
| none | a local node of our own | the same |
| `auto`, HOST:PORT | joins: this machine is part of that cluster | the same |
| http://HEAD:8265 | submits a job and follows it | joins the cluster that this machine is part of |

The job is `flowtrain launch` itself, with the resolved config; what it ends with stands in its log, in front of the
last line, as one record that only a follower reads.

| signal here | first | second |
|---|---|---|
| SIGINT, SIGTERM | asks the job to stop in order: it finishes its step and saves | leaves it to do so alone |
| the same while the job is sent | the same, for a job that may not be there yet; ends at once | |

Whoever reads stdout may go away (`| head`): the job is followed on to its end, for the exit code.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flowtrain import mirror
from flowtrain.cli.failure import JOB, JOB_END
from flowtrain.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ConfigError,
    Interrupted,
    LostProcessError,
    PlanError,
    Terminated,
)
from flowtrain.runtime.guard import inside
from flowtrain.telemetry.streams import tell

if TYPE_CHECKING:
    from flowtrain.config.schema import Config
    from flowtrain.runtime.jobs import Job, Jobs

SWEEP_SECONDS = 15.0
"""What the launcher may take beyond its patience with the driver, to end what is left."""


def is_dashboard(address: str | None) -> bool:
    return address is not None and address.lower().startswith(("http://", "https://"))


def address_override(option: str | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What `--address`, or else RAY_ADDRESS, says in place of the config's `cluster.address`."""
    address = (option or environment.get("RAY_ADDRESS") or "").strip()
    return [f"cluster.address={address}"] if address else []


def as_job(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the run is sent to a dashboard, by the table above.

    Raises:
        ConfigError: the address is of a kind that cannot carry a run.
    """
    address = config.cluster.address
    if address is not None and "://" in address and not is_dashboard(address):
        raise ConfigError(
            f"cluster.address: {address} cannot carry a run: give the dashboard's URL (http://HEAD:8265) to submit a "
            f"job, or HOST:PORT to join the cluster from one of its nodes"
        )
    if address is not None and not is_dashboard(address):
        check_head(address)
    return is_dashboard(address) and not inside(environment)


def check_head(address: str) -> None:
    """Raises `ConfigError` where `address`, no URL, is of no cluster either."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(
            f"cluster.address: {address} lacks a port: give HOST:PORT of the head (6379 by default) to join its "
            f"cluster from one of its nodes, or the dashboard's URL, http://HEAD:8265, to submit a job"
        )


def joined(config: Config, environment: Mapping[str, str] = os.environ) -> Config:
    """Inside a job or an allocation: a dashboard's URL means the cluster that this machine is part of."""
    meant = is_dashboard(config.cluster.address) and inside(environment)
    return _with_address(config, "auto") if meant else config


def _with_address(config: Config, address: str) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": address})})


def check_visible(config: Config) -> None:
    """What the run reads is there, seen from the node on which a job begins (exit 4); the start looks on the others."""
    paths = {"model.path": config.model.path, "data.train": config.data.train, "data.eval": config.data.eval}
    for key, path in paths.items():
        if path is None:
            continue
        node = f"node {socket.gethostname()} of the cluster, on which the job began,"
        try:
            mirror.fetch(path)
        except mirror.FetchError as error:
            raise PlanError(f"{node} cannot read {key}: {error}") from error
        if not path.exists():
            raise PlanError(
                f"{node} does not have {path} ({key}): "
                f"put model, data and run.dir on storage that all nodes share, under the same path"
            )


def environment_of(given: list[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`NAME=VALUE` as written, `NAME` as it is here."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environment):
            raise ConfigError(f"--env {text}: write NAME=VALUE, or NAME of a variable that is set here")
        found[name] = value if equals else environment[name]
    return found


def submit(
    address: str,
    arguments: list[str],
    config: Config | None,
    files: Mapping[str, str],
    environment: Mapping[str, str],
    patience: float,
) -> tuple[Jobs, str]:
    """Send a command to a dashboard; returns the cluster's jobs and the id.

    `config`: what the command finds as config.yaml, the cluster being its address. `patience`: seconds that the command
    may take to end in order.
    """
    from flowtrain.config.loading import dump_resolved
    from flowtrain.runtime.jobs import Jobs

    jobs = Jobs(address)
    variables = {
        **environment,
        JOB: "1",
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(patience + SWEEP_SECONDS)),
    }
    sent, metadata = dict(files), {"flowtrain_command": arguments[0]}
    if config is not None:
        sent["config.yaml"] = dump_resolved(_with_address(config, "auto"))
        metadata["flowtrain_run_dir"] = str(config.run.dir)
    job_id = f"flowtrain_{secrets.token_hex(8)}"
    try:
        jobs.submit(job_id, arguments, sent, variables, metadata)
    except (Interrupted, Terminated) as error:
        raise type(error)(f"{error} while job {job_id} was being sent: {_withdrawn(jobs, job_id)}") from error
    except PlanError as error:
        if not _arrived(jobs, job_id, error):
            raise
    return jobs, job_id


def _arrived(jobs: Jobs, job_id: str, error: PlanError) -> bool:
    """Whether a job is there although sending it failed by `error`: its answer may be what was lost.

    Raises:
        PlanError: nobody tells.
    """
    try:
        jobs.job(job_id)
    except ConfigError:
        return False
    except PlanError:
        look = f"`flowtrain jobs list --address {jobs.address}`"
        raise PlanError(f"{error}; job {job_id} may be on the cluster, see {look}") from error
    return True


def _withdrawn(jobs: Jobs, job_id: str) -> str:
    """What has become of a job that is wanted no more and may not be there."""
    try:
        jobs.stop(job_id)
    except ConfigError:
        return "it is not on the cluster"
    except PlanError:
        return f"it may be on the cluster; see `flowtrain jobs list --address {jobs.address}`"
    return "it was asked to stop"


def follow(jobs: Jobs, job_id: str, stopping: str, json_file: Path | None = None) -> int:
    """Print the job's log as it grows and its last line on stderr; returns the job's exit code.

    A signal asks the job to stop, as the module's table says; `stopping`: what it then does, told on screen.
    """
    log, asked, heard = JobLog(), False, False
    with _signals() as received:
        for piece in jobs.follow(job_id):
            tell(log.feed(piece), end="", stream=sys.stdout)
            if received and not asked:
                asked = True
                tell(f"asking job {job_id} to stop: {stopping}; once more leaves it to do so alone")
            if received and not heard:
                heard = _stopped(jobs, job_id)
            if len(received) > 1:
                return _detached(received[0], jobs, job_id, heard)
            if log.end is not None:  # nothing that the run started is left by then
                break
    tell(log.rest(), end="", stream=sys.stdout)
    return _ended(log, jobs, job_id, json_file)


def _stopped(jobs: Jobs, job_id: str) -> bool:
    """Ask; false where the dashboard does not hear it now. One that is gone is noticed by who follows."""
    try:
        jobs.stop(job_id)
    except (PlanError, ConfigError):
        return False
    return True


def watch(jobs: Jobs, job_id: str, quiet: bool = False) -> int:
    """The same without a hand on the job: a signal ends the watching. `quiet`: only the last line, of a job that has
    been asked to stop."""
    log = JobLog()
    try:
        for piece in jobs.follow(job_id):
            shown = log.feed(piece)
            if not quiet:
                print(shown, end="", flush=True)
            if log.end is not None:
                break
    except (Interrupted, Terminated) as error:
        on = "ends by itself" if quiet else "goes on"
        look = f"`flowtrain jobs logs {job_id} --address {jobs.address}` shows it"
        raise type(error)(f"{error}: job {job_id} is no longer watched and {on}; {look}") from error
    if not quiet:
        print(log.rest(), end="", flush=True)
    return _ended(log, jobs, job_id)


def _ended(log: JobLog, jobs: Jobs, job_id: str, json_file: Path | None = None) -> int:
    """The job is over: its last line, its summary where that is wanted, its exit code."""
    log.rest()
    end = log.end or _guessed(jobs.job(job_id))
    if json_file is not None and end.get("result") is not None:
        from flowtrain.cli.rundir import write_json

        write_json(json_file, end["result"])
    if end["line"]:
        tell(end["line"])
    return int(end["exit"])


class JobLog:
    """Cuts a job's log into what is shown and the record of the end, behind which nothing is shown."""

    def __init__(self) -> None:
        self.end: dict[str, Any] | None = None
        self._open = ""

    def feed(self, piece: str) -> str:
        """What of the log can be shown now, whole lines."""
        *lines, self._open = (self._open + piece).split("\n")
        return "".join(map(self._shown, lines))

    def rest(self) -> str:
        """A last line without its end."""
        line, self._open = self._open, ""
        return self._shown(line) if line else ""

    def _shown(self, line: str) -> str:
        """What another process has left without an end of line may stand in front of the record."""
        if self.end is not None:
            return ""
        before, mark, record = line.partition(JOB_END)
        if not mark:
            return f"{line}\n"
        try:
            end = json.loads(record)
            self.end = {"exit": int(end["exit"]), "line": end["line"], "result": end["result"]}
        except (ValueError, KeyError, TypeError):  # torn, or words of another program that are like it
            return f"{line}\n"
        return f"{before}\n" if before else ""


def _guessed(job: Job) -> dict[str, Any]:
    """How a job ended that left no record: its process was killed, or never started."""
    run_dir = (job.metadata or {}).get("flowtrain_run_dir", "RUN_DIR")
    way_on = f"go on from what is saved with --resume {run_dir}"
    if job.status == "STOPPED":
        return {"exit": EXIT_INTERRUPTED, "line": f"job {job.id} was stopped before it could say how; {way_on}"}
    if job.code is not None and job.code > 0:
        line = f"job {job.id} ended with exit code {job.code} and left no message; its log is above"
        return {"exit": job.code if job.code < 128 else EXIT_BUG, "line": line}
    if job.status == "SUCCEEDED":
        return {"exit": 0, "line": None}
    message = " ".join(job.message.partition(", last available logs")[0].split())[:300]  # the log is above
    return {
        "exit": LostProcessError.exit_code,
        "line": f"job {job.id} was lost ({job.status}: {message}): it was killed, or its node is gone; {way_on}",
    }


def _detached(first: signal.Signals, jobs: Jobs, job_id: str, heard: bool) -> int:
    """`heard`: the dashboard has taken the request to stop."""
    if heard:
        state, command = "which ends by itself: see it with", "logs"
    else:
        state, command = "which could not be asked to stop and may run on: end it with", "stop"
    tell(f"left job {job_id}, {state} `flowtrain jobs {command} {job_id} --address {jobs.address}`")
    return EXIT_INTERRUPTED if first is signal.SIGINT else EXIT_TERMINATED


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM are noted in a list while this is open."""
    received: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
