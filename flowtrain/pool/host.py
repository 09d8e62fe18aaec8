"""Who counts as being on the same machine: processes that can open each other's memory through /proc (contract C6),
and what a machine is called, whatever runs on it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def host_identity() -> str:
    """The same text for two processes exactly when they run under one kernel and see each other's process ids.

    Two containers of one machine share the kernel and not the process ids: they count as two machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


@cache
def machine_name() -> str:
    """Its host name, and the start of its id where it has one; the same after a restart."""
    try:
        identity = Path("/etc/machine-id").read_text().strip()[:8]
    except OSError:
        identity = ""
    return "-".join(part for part in (os.uname().nodename, identity) if part)
