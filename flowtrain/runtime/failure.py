"""Finds the true cause among the failures of several processes (C9, R18): who died, before who noticed.

When a process dies, the others' collectives fail too, often sooner than the death is reported. So after the first
failure the answers of a short grace period are collected, and the best story is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from flowtrain.errors import FlowTrainError, LostProcessError, PeerError
from flowtrain.plan import layout_text
from flowtrain.runtime.executor import Answer, Executor
from flowtrain.types import Role

if TYPE_CHECKING:
    from flowtrain.parallel.groups import Groups

GRACE_SECONDS = 3.0


class Failure(NamedTuple):
    """What a run ends with: the error, and the process that died where that is the cause."""

    error: BaseException
    dead: tuple[Role, int] | None


def true_cause(first: Answer, executor: Executor, grace_seconds: float = GRACE_SECONDS) -> Failure:
    """The failure to end with, after listening for others for up to `grace_seconds`."""
    failures = [_failure(first)]
    deadline = time.monotonic() + grace_seconds
    while _rank(min(failures, key=_rank)) > 0 and (left := deadline - time.monotonic()) > 0:
        answer = executor.next(min(left, 0.2))
        if answer is not None and answer.error is not None:
            failures.append(_failure(answer))
    return min(failures, key=_rank)


def _failure(answer: Answer) -> Failure:
    assert answer.error is not None
    return Failure(answer.error, (answer.role, answer.rank) if answer.died else None)


def _rank(failure: Failure) -> int:
    """Smaller is closer to the cause; 0 ends the search. A lost process is preferred to what it made others say, be it
    of a peer that they cannot reach."""
    error = failure.error
    if isinstance(error, LostProcessError):
        return 1 if failure.dead is None else 0
    if isinstance(error, PeerError):
        return 4
    return 2 if isinstance(error, FlowTrainError) else 3


@contextmanager
def telling_peers(groups: Groups | None, role: Role, method: str) -> Iterator[None]:
    """A collective inside a forward or backward that fails does so because of another rank, and says so."""
    try:
        yield
    except RuntimeError as error:
        alone = groups is None or groups.mesh is None
        if alone or not ("gloo" in str(error) or "nccl" in str(error).lower()):
            raise
        assert groups is not None
        raise PeerError(
            f"{role} {groups.rank}: a collective of the {layout_text(groups.layout)} ranks of its side failed in "
            f"{method}: another rank is gone or late ({str(error).splitlines()[0]})"
        ) from error
