"""Which transport a reader uses for each owner, decided from the owners' handles (contract C7).

| the owner is | transport |
|---|---|
| this process | `local` |
| another process of this machine | `shm` |
| on another machine, or memory that is not shared; a reader of this machine copies for this one | `copies` |
| the same, and none does | the first of the reader's others that all such owners can be reached by |

Copies lie in one ring of the reader, so all of them come by one transport. A reader that was given fewer transports has
fewer to choose from: that is how a transport is forced.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from flowtrain.errors import PlanError
from flowtrain.pool.segment import SegmentHandle

MAPPED = ("local", "shm")
"""Transports that see the owner's own pages."""


COPIES = "copies"
"""The transport that sees what another reader of this machine has copied."""


def choose_transports(
    handles: Sequence[SegmentHandle], host: str, available: Collection[str], in_use: Collection[str] = ()
) -> dict[int, str]:
    """By owner, a name out of `available`, which is in the order of preference; `host` is this process's own machine,
    `in_use` what it reaches others by.

    Raises:
        PlanError: none of them reaches an owner.
    """
    chosen = {handle.owner: _mapped(handle, host, available) for handle in handles}
    apart = [handle for handle in handles if not chosen[handle.owner]]
    copying = [COPIES] if COPIES in available else [name for name in available if name not in MAPPED]
    copying = [name for name in copying if name in in_use] or copying
    for name in copying:
        if name == COPIES or all(name in handle.endpoints for handle in apart):
            return chosen | {handle.owner: name for handle in apart}
    for handle in apart:
        if not set(copying[-1:]) & handle.endpoints.keys():
            raise _unreached(handle, host, [name for name in available if name in (*MAPPED, *copying[-1:])])
    return chosen


def _mapped(handle: SegmentHandle, host: str, available: Collection[str]) -> str:
    """The transport that sees the owner's own pages; empty without one."""
    if handle.host == host:
        if "local" in available and handle.pid == os.getpid():
            return "local"
        if "shm" in available and handle.fd >= 0:
            return "shm"
    return ""


def _unreached(handle: SegmentHandle, host: str, available: Sequence[str]) -> PlanError:
    here = "this machine" if handle.host == host else "another machine"
    return PlanError(
        f"the segment of pool owner {handle.owner} (process {handle.pid}, on {here}) can be reached by none of the "
        f"transports of this process ({', '.join(available) or 'none'}); its own are "
        f"{', '.join(sorted(handle.endpoints)) or 'shared memory only'}: set pool.transport to one that both have"
    )
