"""Finds the true cause among the failures of several processes (C9, R18): who died, before who noticed.

When a process dies, the others' collectives fail too, often sooner than the death is reported. So after the first
failure the answers of a short grace period are collected, and the best story is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flowtrain.errors import FlowTrainError, LostProcessError, PeerError
from flowtrain.runtime.executor import Answer, Executor

GRACE_SECONDS = 3.0


def true_cause(first: Answer, executor: Executor, grace_seconds: float = GRACE_SECONDS) -> BaseException:
    """The error to end with, after listening for others for up to `grace_seconds`."""
    assert first.error is not None
    errors: list[BaseException] = [first.error]
    deadline = time.monotonic() + grace_seconds
    while _rank(min(errors, key=_rank)) > 0 and (left := deadline - time.monotonic()) > 0:
        answer = executor.next(min(left, 0.2))
        if answer is not None and answer.error is not None:
            errors.append(answer.error)
    return min(errors, key=_rank)


def _rank(error: BaseException) -> int:
    """Smaller is closer to the cause; 0 ends the search. A lost process is preferred to what it made others say."""
    order: tuple[Callable[[BaseException], bool], ...] = (
        lambda e: isinstance(e, LostProcessError),
        lambda e: isinstance(e, FlowTrainError) and not isinstance(e, PeerError),
        lambda e: not isinstance(e, PeerError),
    )
    return next((place for place, matches in enumerate(order) if matches(error)), len(order))
