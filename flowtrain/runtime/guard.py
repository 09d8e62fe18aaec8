"""Ties the life of a process to another one's, so that nothing is left behind however a run dies (contract C9).

Linux only: a pidfd becomes readable when its process ends, even by SIGKILL, and the kernel sends a parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1

RUN_ID = "FLOWTRAIN_RUN_ID"
"""Set by the launcher in the environment of every process of a run."""


def inside(environment: Mapping[str, str] = os.environ) -> str | None:
    """What started this process and signals all of its processes at once: a Ray job, a Slurm allocation, or neither."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environment:
        return "a Ray job"
    return "a Slurm allocation" if "SLURM_JOB_ID" in environment else None


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask the kernel for `number` when the parent dies; if it is gone already, send it now."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with(pid: int, host: str) -> None:
    """End this process as soon as `pid` of the same host ends; does nothing for a process of another host.

    The run's processes that are there now go first: Ray's agents would need more than a minute to notice by themselves.
    They are found beforehand, because Ray ends this process too, as soon as it misses its node.
    """
    if os.uname().nodename != host:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    members = []
    for member in marked(os.environ.get(RUN_ID)):
        with suppress(OSError):
            members.append(os.pidfd_open(member))

    def wait() -> None:
        select.select([descriptor], [], [])
        for member in members:
            with suppress(OSError):
                signal.pidfd_send_signal(member, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-driver", daemon=True).start()


def marked(run_id: str | None) -> Iterator[int]:
    """Other processes of this node with the run's id in their environment, and what these started.

    A process that gives itself a title may overwrite its environment with it, as Ray's agents do.
    """
    if not run_id:
        return
    mark = f"{RUN_ID}={run_id}".encode()
    members: set[int] = set()
    parents: dict[int, int] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            parents[pid] = int(stat[stat.rindex(b")") :].split()[2])
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                members.add(pid)
    while started := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= started
    yield from sorted(members - {os.getpid()})
