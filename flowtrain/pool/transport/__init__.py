"""The carriers of pool bytes, by the name that `pool.transport` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowtrain.pool.segment import OwnSegment
from flowtrain.pool.transport.base import Span, Transport
from flowtrain.pool.transport.choice import choose_transports
from flowtrain.pool.transport.copies import CopiesTransport
from flowtrain.pool.transport.local import LocalTransport
from flowtrain.pool.transport.nixl import NixlTransport
from flowtrain.pool.transport.shm import ShmTransport

__all__ = [
    "TRANSPORTS",
    "CopiesTransport",
    "LocalTransport",
    "NixlTransport",
    "ShmTransport",
    "Span",
    "Transport",
    "choose_transports",
    "make_transports",
]

TRANSPORTS: dict[str, Callable[[OwnSegment | None], Transport]] = {
    "local": lambda segment: LocalTransport(),
    "shm": lambda segment: ShmTransport(),
    "nixl": NixlTransport,
}


def make_transports(names: Iterable[str], segment: OwnSegment | None = None) -> dict[str, Transport]:
    """`local` within one process, `shm` between processes of one node, `nixl` also between nodes.

    `segment`: this process's own, which `nixl` offers to others or fills with what it copies.
    """
    return {name: TRANSPORTS[name](segment) for name in names}
