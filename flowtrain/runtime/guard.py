"""Ties the life of a process to another one's, so that nothing is left behind however a run dies (contract C9).

Linux only: a pidfd becomes readable when its process ends, even by SIGKILL, and the kernel sends a parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask the kernel for `number` when the parent dies; if it is gone already, send it now."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with(pid: int, host: str) -> None:
    """End this process as soon as `pid` of the same host ends; does nothing for a process of another host."""
    if os.uname().nodename != host:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-driver", daemon=True).start()
