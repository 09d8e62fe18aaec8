"""A process's part of the pool: its segment, the transports it offers and uses, the client over both.

| `pool.transport` | transports of a process, preferred first |
|---|---|
| any, stages in one process | `local` |
| `auto`, one node | `shm` |
| `auto`, several nodes | `shm`, `nixl` where it is installed, `ray` |
| a name | that one, also between processes of one node |

The reader chooses for each owner (`flowtrain.pool.transport.choice`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flowtrain.config.schema import Config
from flowtrain.plan import Plan
from flowtrain.pool.arrays import Arrays
from flowtrain.pool.client import PoolClient
from flowtrain.pool.host import machine_name
from flowtrain.pool.registry import Entry, register, run_name, start_of
from flowtrain.pool.segment import OwnSegment
from flowtrain.pool.transport import Transport, make_transports
from flowtrain.pool.transport.nixl_agent import keep_to_loopback, why_missing
from flowtrain.runtime.executor import StageSpec


def transport_names(config: Config, *, local: bool, spread: bool) -> tuple[str, ...]:
    """See the table above. `local`: all stages share this process; `spread`: the plan has several nodes."""
    if local:
        return ("local",)
    if config.pool.transport != "auto":
        return (config.pool.transport,)
    if not spread:
        return ("shm",)
    return ("shm", "ray") if why_missing() else ("shm", "nixl", "ray")


def transport_warnings(config: Config, plan: Plan) -> list[str]:
    """What works, and slower than it could; judged by what is installed on this node."""
    spread = len({rank.node for side in (plan.producers, plan.consumers) for rank in side.ranks}) > 1
    if not spread or config.pool.transport != "auto" or (missing := why_missing()) is None:
        return []
    return [
        f"features go between nodes through Ray's object store, which is slower than NIXL: {missing} "
        f"(pip install 'flowtrain[nixl]' on every node; pool.transport: ray silences this)"
    ]


def make_pool(
    config: Config,
    spec: StageSpec,
    segment: OwnSegment | None,
    *,
    local: bool,
    endpoint: bytes | None,
    arrays: Arrays | None = None,
) -> PoolClient:
    """The client of a process over its segment, None where the plan gives it none.

    `endpoint`: how other processes of the cluster call this one; `arrays`: as in `PoolClient`.
    """
    if config.cluster.address is None:
        keep_to_loopback()
    names = transport_names(config, local=local, spread=spec.spread)
    transports = make_carriers(names, segment, endpoint)
    entry = register(_entry(spec, segment)) if segment is not None else None
    return PoolClient(
        segment,
        transports,
        checksum=config.pool.checksum,
        timeout_seconds=config.run.timeout_seconds,
        registration=entry,
        arrays=arrays,
    )


def make_carriers(names: Sequence[str], segment: OwnSegment | None, endpoint: bytes | None) -> dict[str, Transport]:
    """Transports by name, those of the pool and `ray`; Ray is imported only for that one."""
    carriers = make_transports([name for name in names if name != "ray"], segment)
    if "ray" in names:
        from flowtrain.runtime.ray_transport import RayTransport

        carriers["ray"] = RayTransport(segment, endpoint)
    return carriers


def _entry(spec: StageSpec, segment: OwnSegment) -> Entry:
    """How this process and its segment show in `flowtrain pool ls`."""
    run_dir, handle, started = Path(spec.run_dir), segment.handle(), start_of(os.getpid())
    assert started is not None, "a running process has started"
    return Entry(
        run=run_name(run_dir, os.getppid()),
        run_dir=str(run_dir),
        role=f"{spec.rank_plan.role.value} {spec.rank_plan.rank}",
        owner=handle.owner,
        pid=handle.pid,
        started=started,
        machine=machine_name(),
        host=handle.host,
        bytes=handle.bytes,
        fd=handle.fd,
        inode=handle.inode,
    )
