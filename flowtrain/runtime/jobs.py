"""The jobs of a running Ray cluster, seen through its dashboard: submitted, followed, stopped, listed (ADR 0019).

    this machine ──HTTP, token──▶ dashboard ──▶ supervisor on the head node ──▶ flowtrain launch config.yaml
        ▲                                                                            │ joins the cluster, as by hand
        └──────────────── log, as it grows; its record of the end ◀─────────────────┘

Every call has a time-out; what cannot be reached, or refuses this user, is one sentence (exit 4).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

import flowtrain
from flowtrain.errors import ConfigError, LostProcessError, PlanError
from flowtrain.runtime.silence import check_url, silence

CALL_SECONDS = 20.0
LOST_SECONDS = 15.0
"""How long a dashboard may be out of reach before its job counts as lost."""

LOOK_SECONDS = 5.0
"""A log that says nothing for so long: is the dashboard still there?"""

AGENT_SECONDS = 20.0
"""How long a cluster may have nobody to start a job, as in the seconds after its own start."""

PAUSE_SECONDS = 0.5
"""Between two questions to a dashboard whose answer was none: not yet there, gone, or a log without news."""

NO_AGENT = "No available agent"

PYTHON = '"$(command -v python || command -v python3)"'
"""The interpreter of the head node's Ray, as `ray job submit -- python` finds it."""

_TALKATIVE = (
    "ray.dashboard.modules.job.sdk",
    "ray.dashboard.modules.dashboard_sdk",
    "ray._private.runtime_env.packaging",
)
_OVERRIDING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


@dataclass(frozen=True, slots=True)
class Job:
    """One job; `ended` in seconds since 1970, None while it runs; `code`: of its process, where Ray knows it."""

    id: str
    status: str
    entrypoint: str
    message: str
    started: float | None = None
    ended: float | None = None
    code: int | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


class _Client(JobSubmissionClient):
    """Ray's, whose requests would wait for ever."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        return super()._do_request(method, endpoint, **{"timeout": CALL_SECONDS, **options})


class Jobs:
    """`address`: URL of a dashboard, such as http://head:8265; a page of it (`/#/jobs`) is as good."""

    def __init__(self, address: str) -> None:
        self.address = address = urldefrag(address.strip()).url.rstrip("/")
        check_url(address)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        token = cluster_token()
        with self._told(), _without(_OVERRIDING):  # Ray would prefer what these say to the address given
            self._client = _Client(address, headers={"Authorization": f"Bearer {token}"} if token else None)

    def submit(
        self,
        job_id: str,
        arguments: Sequence[str],
        files: Mapping[str, str],
        environment: Mapping[str, str],
        metadata: Mapping[str, str],
    ) -> None:
        """Run `python -m flowtrain.cli.main ARGUMENTS` on the cluster as the job `job_id`, which no other may have.

        `files`: name ▶ content, in the folder in which it runs. The package of this process goes with it.
        """
        words = " ".join(map(shlex.quote, ("-m", "flowtrain.cli.main", *arguments)))
        with tempfile.TemporaryDirectory(prefix="flowtrain-job-") as folder, self._told():
            for name, content in files.items():
                Path(folder, name).write_text(content, encoding="utf-8")
            env: dict[str, Any] = {
                "working_dir": folder,
                "py_modules": [str(Path(flowtrain.__file__).parent)],
                "excludes": ["__pycache__"],
                "env_vars": dict(environment),
            }
            deadline = time.monotonic() + AGENT_SECONDS
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=f"exec {PYTHON} {words}",
                        submission_id=job_id,
                        runtime_env=env,
                        metadata=dict(metadata),
                    )
                    return
                except RuntimeError as error:  # a head node that has just started
                    if NO_AGENT not in str(error) or time.monotonic() > deadline:
                        raise
                time.sleep(PAUSE_SECONDS)

    def job(self, job_id: str) -> Job:
        with self._told(job_id):
            return _job(self._client.get_job_info(job_id))

    def all(self) -> list[Job]:
        """Those that were submitted as jobs, newest first."""
        with self._told():
            found = [_job(one) for one in self._client.list_jobs() if one.submission_id]
        return sorted(found, key=lambda job: job.started or 0.0, reverse=True)

    def stop(self, job_id: str) -> bool:
        """Ask a job to end in order; whether there was something to stop."""
        with self._told(job_id):
            return bool(self._client.stop_job(job_id))

    def logs(self, job_id: str) -> str:
        with self._told(job_id):
            return str(self._client.get_job_logs(job_id))

    def follow(self, job_id: str) -> Iterator[str]:
        """The log as it grows, in pieces, from its beginning to the job's end; an empty piece at least once a second,
        so that the caller gets to look at other things. Where no stream comes through (a proxy that knows no
        websockets), the log is asked for instead.

        Raises:
            ConfigError: there is no such job.
            LostProcessError: the dashboard has not answered for `LOST_SECONDS`, or no longer knows the job.
        """
        with suppress(PlanError):  # of which there may be more before it counts
            self.job(job_id)
        seen, heard = 0, time.monotonic()
        while True:
            at = 0
            for piece in self._tail(job_id):
                new, at = piece[max(seen - at, 0) :], at + len(piece)
                seen = max(seen, at)
                if new:
                    heard = time.monotonic()
                elif time.monotonic() - heard > LOOK_SECONDS:
                    found = self._look(job_id)
                    if isinstance(found, Job):
                        heard = time.monotonic()
                    elif time.monotonic() - heard > LOST_SECONDS:
                        raise self._lost(job_id, found) from found
                yield new
            while not isinstance(found := self._look(job_id), Job):
                if time.monotonic() - heard > LOST_SECONDS:
                    raise self._lost(job_id, found) from found
                yield ""
                time.sleep(PAUSE_SECONDS)
            heard = time.monotonic()
            if not at:  # no stream
                log = self._log(job_id)
                new, seen = log[seen:], max(seen, len(log))
                yield new
            if found.over:
                return
            if not at:
                time.sleep(PAUSE_SECONDS)

    def _tail(self, job_id: str) -> Iterator[str]:
        """One connection, until either side ends it; an empty piece where nothing comes for half a second."""
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        async def listen() -> None:
            async for piece in self._client.tail_job_logs(job_id):
                pieces.put(piece)

        def run() -> None:
            with suppress(Exception):  # a connection that breaks ends the pieces; the caller asks what has become of it
                asyncio.run(listen())
            pieces.put(None)

        threading.Thread(target=run, name=f"follow-{job_id}", daemon=True).start()
        while True:
            try:
                piece = pieces.get(timeout=0.5)
            except queue.Empty:
                piece = ""
            if piece is None:
                return
            yield piece

    def _look(self, job_id: str) -> Job | PlanError:
        """The job, or why the dashboard does not tell it."""
        try:
            return self.job(job_id)
        except PlanError as error:
            return error
        except ConfigError as error:
            raise LostProcessError(f"{error}: its head node was started anew; go on with --resume") from error

    def _log(self, job_id: str) -> str:
        with suppress(PlanError, ConfigError):  # whether it is there is looked at by who follows
            return self.logs(job_id)
        return ""

    def _lost(self, job_id: str, why: PlanError) -> LostProcessError:
        seen = str(why).removeprefix("cluster.address: ").split(": ")[0]
        return LostProcessError(
            f"the dashboard at {self.address} has not answered for {LOST_SECONDS:g} s while job {job_id} ran ({seen}): "
            f"its head node is gone or out of reach; `flowtrain jobs list --address {self.address}` shows whether the "
            f"job is still there, else go on with --resume"
        )

    @contextmanager
    def _told(self, job_id: str | None = None) -> Iterator[None]:
        """What Ray's client raises, as one sentence."""
        try:
            yield
        except AuthenticationError as error:
            given = "the token given is not the cluster's" if cluster_token() else "no token was given"
            raise PlanError(
                f"cluster.address: {self.address} refuses this user ({given}): set RAY_AUTH_TOKEN, or "
                f"RAY_AUTH_TOKEN_PATH to a file with it, or put it into ~/.ray/auth_token "
                f"(on the head node: `ray get-auth-token`)"
            ) from error
        except (requests.RequestException, ConnectionError, TimeoutError) as error:
            raise PlanError(f"cluster.address: {silence(self.address, error, CALL_SECONDS)}") from error
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"cluster.address: what answers at {self.address} is no Ray dashboard: give the URL that "
                f"`ray start --head` has printed"
            ) from error
        except (RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            if NO_AGENT in text:
                raise PlanError(
                    f"the cluster at {self.address} takes no jobs: its head node has had no agent for "
                    f"{AGENT_SECONDS:g} s: see logs/dashboard_agent.log of Ray's session there (where another Ray on "
                    f"the machine has its port, 52365: `ray start --dashboard-agent-listen-port`)"
                ) from error
            if job_id is not None and ("404" in text or "does not exist" in text):
                raise ConfigError(
                    f"{self.address} has no job {job_id}: `flowtrain jobs list --address {self.address}` shows "
                    f"those that are there"
                ) from error
            raise PlanError(f"the Ray dashboard at {self.address} refused the request: {text[:300]}") from error


def cluster_token() -> str | None:
    """The token of the cluster as Ray looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return _sendable(token, "RAY_AUTH_TOKEN")
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(given).expanduser() if given else Path.home() / ".ray" / "auth_token"
    try:
        return _sendable(file.read_text(encoding="utf-8", errors="replace").strip(), str(file)) or None
    except OSError as error:
        if given:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {file} cannot be read: {error.strerror}") from error
        return None


def _sendable(token: str, where: str) -> str:
    """The token, which travels in a header of HTTP."""
    if not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{where} holds no token: give what `ray get-auth-token` prints, one line without spaces")
    return token


def _job(info: Any) -> Job:
    def seconds(milliseconds: int | None) -> float | None:
        return milliseconds / 1000 if milliseconds else None

    return Job(
        info.submission_id,
        str(info.status.value),
        info.entrypoint,
        info.message or "",
        seconds(info.start_time),
        seconds(info.end_time),
        info.driver_exit_code,
        info.metadata or {},
    )


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
