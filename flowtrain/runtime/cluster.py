"""Starts or joins Ray and places one actor per rank; ends only what it started.

| node | who starts it | who ends it |
|---|---|---|
| local (`cluster.address` null) | we, sized to the plan | `Cluster.close`, and the launcher's sweep if we die |
| a running cluster | its owner | only our actors end |

All processes of a run are on the driver's node, whatever else the cluster has: segments are shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import warnings
from pathlib import Path
from types import TracebackType

import ray

from flowtrain.config.schema import ClusterConfig
from flowtrain.errors import FlowTrainError, Interrupted, PlanError, Terminated
from flowtrain.plan import RankPlan

OBJECT_STORE_BYTES = 96 * 2**20
"""Payload blocks (token ids) only: embeddings go through the pool."""

PROBE_SECONDS = 10.0


class Cluster:
    """A Ray connection for one run."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._session: Path | None = None
        self.connected = False
        self.node_id = ""

    def start(self, ranks: list[RankPlan]) -> None:
        """Connect; refuse at once (exit 4, both numbers) when the cluster has too little for the ranks (R01)."""
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
        cpus = sum(plan.threads for plan in ranks)
        gpus = sum(plan.device.startswith("cuda") for plan in ranks)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._connect(cpus, gpus)
        except FlowTrainError:
            raise  # a signal
        except Exception as error:  # Ray raises a bare one when a node does not start in time
            raise PlanError(f"{self._refusal()}: {' '.join(str(error).split())[:300]}") from error
        self.connected = True
        self.node_id = ray.get_runtime_context().get_node_id()
        there = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == self.node_id)
        for name, need in (("CPU", cpus), ("GPU", gpus)):
            if need > there.get(name, 0):
                raise PlanError(
                    f"the plan needs {need} {name}s and this node of the cluster has {there.get(name, 0):g}: "
                    f"lower producers/consumers `num` or `threads`, or set cluster.oversubscribe: true"
                )

    def _connect(self, cpus: int, gpus: int) -> None:
        if self.config.address is not None:
            host, _, port = self.config.address.rpartition(":")
            if host and port.isdigit():
                # Ray itself tries for minutes when nobody answers.
                socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
            ray.init(address=self.config.address, log_to_driver=False, logging_level=logging.ERROR)
            return
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            _temp_dir=str(self.config.temp_dir) if self.config.temp_dir else None,
        )
        self._session = Path(context.address_info["session_dir"])

    def _refusal(self) -> str:
        if self.config.address is not None:
            hint = "check that a Ray cluster runs there, and its token (RAY_AUTH_TOKEN), or leave it out"
            return f"cluster.address: {self.config.address} cannot be joined; {hint}"
        return "Ray did not start on this machine, which may be too busy or out of memory; try again"

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
