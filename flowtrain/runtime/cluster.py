"""Starts or joins Ray and knows its nodes; ends only what it started.

| node | who starts it | who ends it |
|---|---|---|
| local (`cluster.address` null) | we, sized to the plan | `Cluster.close`, and the launcher's sweep if we die |
| a running cluster | its owner | only our actors end |

A node of our own is sized to the plan. A running cluster is joined first and asked what it has, so that the plan can
say which node each process runs on; the start refuses a plan for which it has too little.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import grpc
import ray
from ray.exceptions import AuthenticationError

from flowtrain.config.schema import ClusterConfig
from flowtrain.errors import FlowTrainError, Interrupted, PlanError, Terminated
from flowtrain.plan import RankPlan
from flowtrain.runtime.nodes import Node, number_nodes
from flowtrain.types import Role

OBJECT_STORE_BYTES = 96 * 2**20
"""Payload blocks (token ids) only: embeddings go through the pool."""

TEMP_BYTES = OBJECT_STORE_BYTES + 64 * 2**20
"""What a local node may write into its temporary folder: objects that /dev/shm has no room for, and logs."""

PROBE_SECONDS = 10.0

PRIORITY: Mapping[str, str] = MappingProxyType({"RAY_worker_niceness": "0"})
"""Environment of the processes of a run. Ray gives workers a niceness of 15, so that any other program on the machine,
the driver and Ray's daemons among them, goes before the stages."""


def temp_folder(config: ClusterConfig) -> Path:
    """Where a local node writes logs, sockets and spilled objects."""
    return config.temp_dir or Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")


def check_temp_space(folder: Path, need_bytes: int = TEMP_BYTES) -> None:
    """`PlanError` with both numbers when the disk of `folder`, which need not be there yet, has less free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < need_bytes:
        raise PlanError(
            f"Ray's temporary folder {folder} may take {need_bytes} bytes and its disk has {free_bytes} free: "
            f"free some, or set cluster.temp_dir to a folder on another disk"
        )


class Cluster:
    """A Ray connection for one run. `object_store_bytes`: of a local node."""

    def __init__(self, config: ClusterConfig, object_store_bytes: int = OBJECT_STORE_BYTES) -> None:
        self.config = config
        self.object_store_bytes = object_store_bytes
        self._session: Path | None = None
        self.connected = self._answered = False
        self.nodes: tuple[Node, ...] = ()

    def join(self) -> tuple[Node, ...]:
        """Connect to the running cluster; its nodes, the driver's first."""
        assert self.config.address is not None, "a node of our own is started, not joined"
        return self._connected(0, 0)

    def start(self, ranks: Sequence[RankPlan]) -> None:
        """Connect where that is not done; refuse at once (exit 4, both numbers) when a node has too little (R01)."""
        if not self.connected:
            self._connected(sum(plan.threads for plan in ranks), sum(map(_gpus, ranks)))
        for node in self.nodes:
            here = [plan for plan in ranks if plan.node == node.number]
            for name, need, there in (
                ("CPU", sum(map(self.cpus_of, here)), node.cpus),
                ("GPU", sum(map(_gpus, here)), node.gpus),
            ):
                if need > there:
                    raise PlanError(
                        f"the plan needs {need} {name}s on node {node.number} ({node.address}) and it has {there:g}: "
                        f"lower producers/consumers `num` or `threads`, or set cluster.oversubscribe: true"
                    )
        missing = sorted({plan.node for plan in ranks} - {node.number for node in self.nodes})
        if missing:
            raise PlanError(f"the plan needs node {missing[0]} and the cluster has {len(self.nodes)} nodes, from 0")

    def cpus_of(self, plan: RankPlan) -> int:
        """CPUs that a process asks of Ray: in a running cluster readers work in the gaps of the others, and so does
        everyone where the config says so."""
        joined = self.config.address is not None
        return 0 if joined and (self.config.oversubscribe or plan.role is Role.READER) else plan.threads

    @property
    def runtime_env(self) -> dict[str, Any] | None:
        """Of the processes of a run, on nodes that others have started; a node of ours hands `PRIORITY` down."""
        return {"env_vars": dict(PRIORITY)} if self.config.address is not None else None

    def _connected(self, cpus: int, gpus: int) -> tuple[Node, ...]:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
        os.environ.update(PRIORITY)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._connect(cpus, gpus)
        except FlowTrainError:
            raise  # a signal
        except Exception as error:  # Ray raises a bare one when a node does not start in time
            raise PlanError(self._refusal(error)) from error
        self.connected = True
        self.nodes = number_nodes(ray.nodes(), ray.get_runtime_context().get_node_id())
        return self.nodes

    def _connect(self, cpus: int, gpus: int) -> None:
        if self.config.address is not None:
            self._answered = False
            _probe(self.config.address)
            self._answered = True
            ray.init(address=self.config.address, log_to_driver=False, logging_level=logging.ERROR)
            return
        check_temp_space(temp_folder(self.config))
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=self.object_store_bytes,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            _temp_dir=str(self.config.temp_dir) if self.config.temp_dir else None,
        )
        self._session = Path(context.address_info["session_dir"])

    def _refusal(self, error: Exception) -> str:
        """Why Ray is not there, and what to look at."""
        said = " ".join(str(error).split())[:300]
        if self.config.address is None:
            return f"Ray did not start on this machine, which may be too busy or out of memory; try again: {said}"
        what = f"cluster.address: {self.config.address}"
        token = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it (on the head node: `ray get-auth-token`)"
        if isinstance(error, AuthenticationError):
            return f"{what} asks for a token and none was given: {token}"
        if self._answered and self.config.address != "auto":
            from flowtrain.runtime.jobs import cluster_token  # with HTTP, which nothing else of a driver needs

            given = "the token given is not the cluster's" if cluster_token() else "it wants a token"
            way = f"{token}, and the same Ray everywhere"
            return (
                f"{what} answers and does not let this process in ({given}, or its Ray is another one): {way}: {said}"
            )
        hint = "check that a Ray head listens there (a dashboard's address is http://HOST:PORT)"
        return f"{what} cannot be joined; {hint}: {said}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that failed keeps Ray's logs, which its message may name; one that was asked to end needs none."""
        self.close(keep_logs=error is not None and not isinstance(error, Interrupted | Terminated))

    def close(self, keep_logs: bool = False) -> None:
        """Leave; a local node ends with it. Logs of a local node go too, unless `keep_logs`. Idempotent."""
        if not self.connected:
            return
        self.connected = False
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
        if self._session is not None and not keep_logs:
            shutil.rmtree(self._session, ignore_errors=True)

    def last_words(self, pid: int | None) -> str:
        """The end of what a process of a local node wrote to stderr: a native crash leaves its message there only."""
        files = self._session.glob(f"logs/worker-*-{pid}.err") if self._session else ()
        with contextlib.suppress(OSError):
            return "\n".join(line for file in files for line in file.read_text(errors="replace").splitlines()[-30:])
        return ""

    @property
    def log_dir(self) -> str:
        return str(self._session / "logs") if self._session else "the cluster's own log folder"


def _probe(address: str) -> None:
    """Raises where nobody answers at a HOST:PORT as a Ray head does: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PROBE_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError(f"no answer within {PROBE_SECONDS:g} s") from error


def _gpus(plan: RankPlan) -> int:
    return int(plan.on_gpu)
