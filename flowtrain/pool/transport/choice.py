"""Which transport a pair of processes uses, decided by the reader from the owner's handle (contract C7).

| the owner is | transport |
|---|---|
| this process | `local` |
| another process of this machine | `shm` |
| on another machine, or memory that is not shared | the first of the reader's others that the owner can be reached by |

A reader that was given fewer transports has fewer to choose from: that is how a transport is forced.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from flowtrain.errors import PlanError
from flowtrain.pool.segment import SegmentHandle

MAPPED = ("local", "shm")
"""Transports that see the owner's own pages."""


def choose_transport(handle: SegmentHandle, host: str, available: Collection[str]) -> str:
    """A name out of `available`, which is in the order of preference; `host` is this process's own machine.

    Raises:
        PlanError: none of them reaches the owner.
    """
    if handle.host == host:
        if "local" in available and handle.pid == os.getpid():
            return "local"
        if "shm" in available and handle.fd >= 0:
            return "shm"
    for name in available:
        if name not in MAPPED and name in handle.endpoints:
            return name
    here = "this machine" if handle.host == host else "another machine"
    raise PlanError(
        f"the segment of pool owner {handle.owner} (process {handle.pid}, on {here}) can be reached by none of the "
        f"transports of this process ({', '.join(available) or 'none'}); its own are "
        f"{', '.join(sorted(handle.endpoints)) or 'shared memory only'}: set pool.transport to one that both have"
    )
