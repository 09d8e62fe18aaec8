"""Blocks of owners on other machines, copied by Ray: works wherever the cluster does, several times slower than NIXL.

    reader (work thread)                       owner's actor (control threads)
      read ── pool_read(pieces) ─────────────▶ bytes of its segment ─▶ object store ─▶ the reader's node ─▶ inbox
      write ─ object store ─▶ the owner's node ─▶ pool_write(pieces, bytes) ─▶ its segment

One call for each pack and owner, each way. The control threads answer while the owner encodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from flowtrain.errors import LostProcessError
from flowtrain.pool.segment import OwnSegment, SegmentHandle
from flowtrain.pool.transport import Span
from flowtrain.pool.transport.inbox import Inbox, Run, by_owner

Piece = tuple[int, int]
"""Offset and bytes in the owner's segment."""


class SegmentServer:
    """What an owner's actor answers for `RayTransport`; `serve` names the segment."""

    _served: OwnSegment | None = None

    def serve(self, segment: OwnSegment | None) -> None:
        self._served = segment

    @ray.method(concurrency_group="control")
    def pool_read(self, pieces: Sequence[Piece]) -> list[Any]:
        """The bytes of each piece: views, which Ray copies into its store."""
        return [self._piece(start, num_bytes) for start, num_bytes in pieces]

    @ray.method(concurrency_group="control")
    def pool_write(self, pieces: Sequence[Piece], contents: Sequence[Any]) -> None:
        """Replace the bytes of each piece."""
        for (start, num_bytes), content in zip(pieces, contents, strict=True):
            np.copyto(self._piece(start, num_bytes), content)

    def _piece(self, start: int, num_bytes: int) -> Any:
        assert self._served is not None, "this process serves no segment"
        assert 0 <= start <= self._served.bytes - num_bytes, f"{num_bytes} bytes from {start} are outside the segment"
        return np.frombuffer(self._served.memory, np.uint8, num_bytes, start)


def own_endpoint() -> bytes:
    """How others reach this actor."""
    return bytes(ray.cloudpickle.dumps(ray.get_runtime_context().current_actor))


class RayTransport:
    """`endpoint`: this process's own actor, None in one that only reads; `segment`: takes the copies."""

    name = "ray"
    pinned_bytes = 0  # the segment is the client's own, and counted there

    def __init__(self, segment: OwnSegment | None, endpoint: bytes | None) -> None:
        self.endpoint = endpoint
        self._segment = segment
        self._inbox: Inbox | None = None
        self._owners: dict[int, tuple[SegmentHandle, Any]] = {}

    def attach(self, handle: SegmentHandle) -> None:
        if handle.owner in self._owners:
            return
        assert self._segment is not None, "a process without a segment has nowhere to put copies"
        if self._inbox is None:
            self._inbox = Inbox(self._segment)
        self._owners[handle.owner] = (handle, ray.cloudpickle.loads(handle.endpoints[self.name]))

    def read(self, spans: Sequence[Span], timeout: float) -> list[memoryview]:
        inbox = self._opened()
        memories = inbox.take(spans)
        try:
            runs = by_owner(inbox.runs(spans))
            calls = {
                owner: self._owners[owner][1].pool_read.remote([(run.there, run.bytes) for run in of_owner])
                for owner, of_owner in runs.items()
            }
            for owner, contents in self._answers(calls, "read", timeout):
                for run, content in zip(runs[owner], contents, strict=True):
                    np.copyto(self._here(run), content)
        except BaseException:
            inbox.give(spans)  # nothing of a late answer is written here
            raise
        return memories

    def write(self, spans: Sequence[Span], timeout: float) -> None:
        runs = by_owner(self._opened().runs(spans))
        calls = {
            owner: self._owners[owner][1].pool_write.remote(
                [(run.there, run.bytes) for run in of_owner], [self._here(run) for run in of_owner]
            )
            for owner, of_owner in runs.items()
        }
        self._answers(calls, "write", timeout)

    def release(self, spans: Sequence[Span]) -> None:
        self._opened().give(spans)

    def detach(self, owner: int) -> None:
        self._owners.pop(owner, None)

    def close(self) -> None:
        self._inbox = None
        self._owners.clear()

    def _answers(self, calls: dict[int, Any], what: str, timeout: float) -> list[tuple[int, Any]]:
        """The answer of each owner, in the order of the calls; the same time-out holds for all together."""
        deadline = time.monotonic() + timeout
        answers = []
        for owner, call in calls.items():
            try:
                answers.append((owner, ray.get(call, timeout=max(deadline - time.monotonic(), 0.001))))
            except GetTimeoutError as error:
                raise self._gone(owner, f"no answer to a {what} within {timeout:g} s") from error
            except RayError as error:
                raise self._gone(owner, " ".join(str(error).split())[:200]) from error
        return answers

    def _here(self, run: Run) -> Any:
        assert self._segment is not None
        return np.frombuffer(self._segment.memory, np.uint8, run.bytes, run.here)

    def _opened(self) -> Inbox:
        assert self._inbox is not None, "no segment of another process is attached"
        return self._inbox

    def _gone(self, owner: int, why: str) -> LostProcessError:
        handle = self._owners[owner][0]
        return LostProcessError(
            f"process {handle.pid}, which holds the segment of pool owner {owner} on machine {handle.machine}, is gone "
            f"or out of reach ({why}): see the log of that process for the cause"
        )
