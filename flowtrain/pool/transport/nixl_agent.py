"""NIXL's own calls, in one place: an agent with one registered memory, its peers, and transfers between them.

NIXL's Python class for an agent lets the progress thread spin, which would take one core of every process that serves a
segment. So agents are made from the bindings below it, which let the thread sleep until something arrives: 0.4 % of a
core, and the same speed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from flowtrain.errors import PlanError
from flowtrain.pool.transport.inbox import Run

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Wheels that carry the same library, built for one CUDA version each; host memory works with either."""

QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "FATAL"}
"""What goes wrong is told by our own errors; unless the user has asked, the libraries write nothing to the terminal."""

PROGRESS_SLEEP_MICROSECONDS = 20_000
"""The longest sleep of a serving agent's thread; what arrives wakes it."""

_BASE = struct.Struct("<Q")
_numbers = itertools.count()


class Peer(NamedTuple):
    """Another process's agent, and where its memory starts there."""

    name: str
    base: int


class Agent:
    """`serves`: others read and write the memory. Not for several threads at once."""

    @staticmethod
    def check_installed() -> None:
        """Raises `PlanError` where NIXL is not installed."""
        if missing := why_missing():
            raise PlanError(f"pool.transport is nixl and {missing}: pip install 'flowtrain[nixl]', or use auto or ray")

    def __init__(self, name: str, memory: memoryview, *, serves: bool) -> None:
        self._nixl = _bindings()
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread = serves
        settings.useListenThread = False
        settings.pthrDelay = PROGRESS_SLEEP_MICROSECONDS
        # Names must differ between all processes that meet, on whichever machine.
        self._agent = self._nixl.nixlAgent(f"{name}-{os.urandom(8).hex()}-{next(_numbers)}", settings)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory  # what is registered must stay mapped
        try:
            self._backend = self._agent.createBackend("UCX", {})
            region = [(self._base, memory.nbytes, 0, "")]
            self._registered = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, region)
            self._agent.registerMem(self._registered, [self._backend])
        except self._errors as error:
            raise PlanError(
                f"NIXL cannot register {memory.nbytes} bytes of memory ({error}): raise the limit of locked memory "
                f"(ulimit -l unlimited), lower pool.bytes, or set pool.transport: ray"
            ) from error

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        found = (getattr(self._nixl, name) for name in dir(self._nixl) if name.endswith("Error"))
        return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))

    def endpoint(self) -> bytes:
        """What `connect` of another process needs."""
        return _BASE.pack(self._base) + bytes(self._agent.getLocalMD())

    def connect(self, endpoint: bytes) -> Peer:
        """Learn where another agent is; the connection is made by the first transfer and kept."""
        (base,) = _BASE.unpack_from(endpoint)
        try:
            name = self._agent.loadRemoteMD(endpoint[_BASE.size :])
        except self._errors as error:
            raise PlanError(
                f"NIXL of this process cannot use the endpoint of another one ({error}): install the same version of "
                f"nixl on all nodes, or set pool.transport: ray"
            ) from error
        return Peer(name.decode() if isinstance(name, bytes) else name, base)

    def post(self, operation: str, peer: Peer, runs: Iterable[Run]) -> Any:
        """Start a `READ` or `WRITE` of these bytes; `ConnectionError` when the peer is known to be gone."""
        runs = list(runs)
        kind = self._nixl.DRAM_SEG
        here = self._nixl.nixlXferDList(kind, [(self._base + run.here, run.bytes, 0) for run in runs])
        there = self._nixl.nixlXferDList(kind, [(peer.base + run.there, run.bytes, 0) for run in runs])
        direction = self._nixl.NIXL_READ if operation == "READ" else self._nixl.NIXL_WRITE
        try:
            transfer = self._agent.createXferReq(direction, here, there, peer.name, b"", [self._backend])
            self._agent.postXferReq(transfer, b"")
        except self._errors as error:
            raise ConnectionError(str(error)) from error
        return transfer

    def done(self, transfer: Any) -> bool:
        """Whether it is complete; moves it on. `ConnectionError` when it failed."""
        try:
            status = self._agent.getXferStatus(transfer)
        except self._errors as error:
            raise ConnectionError(str(error)) from error
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise ConnectionError(f"status {status}")
        return bool(status == self._nixl.NIXL_SUCCESS)

    def release(self, transfer: Any) -> None:
        """Drop a transfer that is complete."""
        self._agent.releaseXferReq(transfer)

    def give_up(self, transfer: Any) -> bool:
        """Drop a transfer; returns whether it had ended, well or not, so that nothing of it can still arrive."""
        try:
            ended = self.done(transfer)
        except ConnectionError:
            ended = True
        try:
            self._agent.releaseXferReq(transfer)
        except self._errors:
            return ended
        return ended

    def close(self) -> None:
        """End the agent and its thread; idempotent."""
        if self._agent is not None:
            self._agent.deregisterMem(self._registered, [self._backend])
        self._agent = self._registered = None
        self._memory = memoryview(b"")


def why_missing() -> str | None:
    """Why NIXL cannot be used here; None when it can."""
    if not any(find_spec(name) for name in PACKAGES):
        return f"none of the packages {', '.join(PACKAGES)} is installed"
    try:
        _bindings()
    except ImportError as error:
        return f"its library cannot be loaded ({error})"
    return None


def keep_to_loopback() -> None:
    """Agents made from now on reach this machine only, and listen nowhere else, unless the user has named a device."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _bindings() -> Any:
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    package = next(name for name in PACKAGES if find_spec(name))
    return import_module(f"{package}._bindings")
