"""Limits of the operating system that a run would meet later, looked at before it starts (R08, R09).

| limit | a run needs | too low |
|---|---|---|
| open files (`ulimit -n`) | some for each process, none for an image or a step | raised where allowed, else refused |
| locked memory (`ulimit -l`) | the pool bytes of a node with GPUs | one warning: copies to the GPU are slower |

Memory of the machine or container, and a block larger than its segment, are checked with the plan
(`flowtrain.allocator.make`, `flowtrain.allocator.room`).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from flowtrain.errors import PlanError
from flowtrain.plan import Plan

BASE_DESCRIPTORS = 256
"""Of one process: libraries, Ray's sockets, logs, the files of a source."""

PEER_DESCRIPTORS = 6
"""For each other process of the run: segment, collectives, Ray's connections."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Open files now and at most; bytes that may be locked (-1: no limit)."""

    open_files: int
    max_open_files: int
    locked_bytes: int


def process_limits() -> ProcessLimits:
    """Those of this process, which its children inherit."""
    files, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessLimits(files, max_files, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def needed_files(plan: Plan) -> int:
    """Descriptors that the busiest process of the plan may have open."""
    num_processes = len(plan.producers.ranks) + len(plan.spare) + len(plan.consumers.ranks) + plan.readers
    return BASE_DESCRIPTORS + PEER_DESCRIPTORS * num_processes


def raise_open_files(plan: Plan, limits: ProcessLimits) -> None:
    """Allow this process and its children the files that the plan needs.

    Raises:
        PlanError: the limit cannot be raised that far.
    """
    needed = needed_files(plan)
    infinite = resource.RLIM_INFINITY
    if limits.open_files == infinite or limits.open_files >= needed:
        return
    if limits.max_open_files != infinite and limits.max_open_files < needed:
        raise PlanError(
            f"a run with these processes may have {needed} files open in one of them and the limit is "
            f"{limits.max_open_files}: raise it (ulimit -Hn, or LimitNOFILE of the service), or lower `num`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits.max_open_files))


def limit_warnings(plan: Plan, limits: ProcessLimits) -> list[str]:
    """What will run slower than it could because of a limit; one line each."""
    on_gpu = any(rank.on_gpu for side in (plan.producers, plan.consumers) for rank in side.ranks)
    if not on_gpu or limits.locked_bytes == resource.RLIM_INFINITY or limits.locked_bytes >= plan.pool_bytes:
        return []
    return [
        f"{plan.pool_bytes} bytes of the pool are to be page-locked for GPUs and the limit is {limits.locked_bytes} "
        f"bytes: what is above it stays pageable, and copies are slower (ulimit -l unlimited)"
    ]
