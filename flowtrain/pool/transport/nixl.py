"""Blocks of owners on other machines, copied by NIXL: RDMA where there is any, else TCP (UCX decides).

    owner                                            reader
    segment registered, agent ── endpoint ─────────▶ attach: connection made once and used again
         ▲   one-sided READ of all blocks of a pack ───▶ inbox (the reader's own segment, registered once)
         └── one-sided WRITE of whole blocks, headers too ◀── gradients

The owner's Python code takes no part in a transfer: where the network needs a hand at the owner's end (TCP), its agent
has a thread of its own, which sleeps until something arrives. The reader has none: its transfers move while it waits.

| happens | then |
|---|---|
| the owner is gone before or during a transfer | `LostProcessError` naming it, as soon as the connection breaks |
| the owner does not move (stopped, network down) | the same after the time-out; the copy's bytes are not used again |
| the reader is gone | the owner does not notice |
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.errors import LostProcessError
from flowtrain.pool.segment import OwnSegment, SegmentHandle
from flowtrain.pool.transport.base import Span
from flowtrain.pool.transport.inbox import Inbox, Run, by_owner
from flowtrain.pool.transport.nixl_agent import Agent, Peer

SPIN_SECONDS = 100e-6
SLEEP_SECONDS = 20e-6
"""Kernel timers make some 70 µs of it: short beside a pack's transfer, and it leaves the core to others."""


@dataclass(frozen=True, slots=True)
class _Owner:
    handle: SegmentHandle
    peer: Peer


class NixlTransport:
    """`segment`: this process's own, for others to read (`endpoint`) or to take copies of what it reads itself.

    Agents are made when they are first needed: a process that uses shared memory only makes none.
    """

    name = "nixl"
    pinned_bytes = 0  # the segment is the client's own, and counted there

    def __init__(self, segment: OwnSegment | None) -> None:
        Agent.check_installed()
        self._segment = segment
        self._serving: Agent | None = None
        self._reading: Agent | None = None
        self._inbox: Inbox | None = None
        self._owners: dict[int, _Owner] = {}
        self._lost: dict[int, str] = {}

    @property
    def endpoint(self) -> bytes | None:
        """Where others reach the segment; from the first call on this process serves it."""
        if self._segment is None:
            return None
        if self._serving is None:
            self._serving = Agent(f"owner-{self._segment.owner}", self._segment.memory, serves=True)
        return self._serving.endpoint()

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner in self._owners:
            return
        if self._reading is None:
            assert self._segment is not None, "a process without a segment has nowhere to put copies"
            self._reading = Agent("reader", self._segment.memory, serves=False)
            self._inbox = Inbox(self._segment)
        self._owners[handle.owner] = _Owner(handle, self._reading.connect(handle.endpoints[self.name]))

    def read(self, spans: Sequence[Span], timeout: float) -> list[memoryview]:
        inbox = self._opened()
        memories = inbox.take(spans)
        try:
            self._move("READ", spans, timeout)
        except BaseException:
            inbox.give(spans)
            raise
        return memories

    def write(self, spans: Sequence[Span], timeout: float) -> None:
        self._move("WRITE", spans, timeout)

    def release(self, spans: Sequence[Span]) -> None:
        self._opened().give(spans)

    def detach(self, owner: int) -> None:
        self._owners.pop(owner, None)
        self._lost.pop(owner, None)

    def close(self) -> None:
        for agent in (self._serving, self._reading):
            if agent is not None:
                agent.close()
        self._serving = self._reading = self._inbox = None
        self._owners.clear()

    def _opened(self) -> Inbox:
        assert self._inbox is not None, "no segment of another process is attached"
        return self._inbox

    def _move(self, operation: str, spans: Sequence[Span], timeout: float) -> None:
        """One transfer for each owner, all at once; on return all are done."""
        assert self._reading is not None
        inbox, started = self._opened(), time.monotonic()
        transfers: dict[int, Any] = {}
        try:
            for owner, runs in by_owner(inbox.runs(spans)).items():
                self._check_alive(owner)
                transfers[owner] = self._post(operation, owner, runs)
            for owner, transfer in transfers.items():
                self._wait(operation, owner, transfer, started, timeout)
        except BaseException:
            unfinished = [owner for owner, transfer in transfers.items() if not self._reading.give_up(transfer)]
            if unfinished:
                inbox.lose(spans)
            raise
        for transfer in transfers.values():
            self._reading.release(transfer)

    def _post(self, operation: str, owner: int, runs: Iterable[Run]) -> Any:
        assert self._reading is not None
        try:
            return self._reading.post(operation, self._owners[owner].peer, runs)
        except ConnectionError as error:
            raise self._gone(owner, str(error)) from error

    def _wait(self, operation: str, owner: int, transfer: Any, started: float, timeout: float) -> None:
        """NIXL has nothing to wait on, so it is asked: at once for a while, then with short sleeps."""
        assert self._reading is not None
        try:
            while not self._reading.done(transfer):
                waited = time.monotonic() - started
                if waited > timeout:
                    raise self._gone(owner, f"no answer to a {operation} within {timeout:g} s")
                if waited > SPIN_SECONDS:
                    time.sleep(SLEEP_SECONDS)
        except ConnectionError as error:
            raise self._gone(owner, str(error)) from error

    def _check_alive(self, owner: int) -> None:
        if owner in self._lost:
            raise self._gone(owner, self._lost[owner])

    def _gone(self, owner: int, why: str) -> LostProcessError:
        """What is lost stays lost: a late answer must not meet a new question."""
        self._lost.setdefault(owner, why)
        handle = self._owners[owner].handle
        return LostProcessError(
            f"process {handle.pid}, which holds the segment of pool owner {owner} on machine {handle.machine}, is gone "
            f"or out of reach ({why}): see the log of that process for the cause"
        )
