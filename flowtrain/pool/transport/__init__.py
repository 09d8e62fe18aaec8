"""The carriers of pool bytes, by the name that `pool.transport` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowtrain.pool.transport.base import Span, Transport
from flowtrain.pool.transport.choice import choose_transport
from flowtrain.pool.transport.local import LocalTransport
from flowtrain.pool.transport.shm import ShmTransport

__all__ = ["TRANSPORTS", "LocalTransport", "ShmTransport", "Span", "Transport", "choose_transport", "make_transports"]

TRANSPORTS: dict[str, Callable[[], Transport]] = {"local": LocalTransport, "shm": ShmTransport}


def make_transports(names: Iterable[str]) -> dict[str, Transport]:
    """`shm` between processes of one node, `local` within one process."""
    return {name: TRANSPORTS[name]() for name in names}
