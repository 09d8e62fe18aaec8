"""The carriers of pool bytes, by the name that `pool.transport` gives them."""

from __future__ import annotations

from collections.abc import Callable

from flowtrain.pool.transport.base import Transport
from flowtrain.pool.transport.local import LocalTransport
from flowtrain.pool.transport.shm import ShmTransport

__all__ = ["TRANSPORTS", "LocalTransport", "ShmTransport", "Transport", "make_transport"]

TRANSPORTS: dict[str, Callable[[], Transport]] = {"local": LocalTransport, "shm": ShmTransport}


def make_transport(name: str) -> Transport:
    """`shm` between processes of one node, `local` within one process."""
    return TRANSPORTS[name]()
