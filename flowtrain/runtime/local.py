"""All stages in this process, called in the order of submission: for a user with one GPU, and for tests without Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowtrain.plan import RankPlan
from flowtrain.runtime.executor import Answer
from flowtrain.runtime.stages import StageSlot
from flowtrain.types import Role


class LocalExecutor:
    """The same calls as across processes, executed when the answer is asked for, oldest first."""

    def __init__(self) -> None:
        self._slots: dict[tuple[Role, int], StageSlot] = {}
        self._queue: deque[tuple[Role, int, str, tuple[Any, ...], Sequence[Any]]] = deque()

    def start(self, ranks: Sequence[RankPlan]) -> None:
        for plan in ranks:
            self._slots[plan.role, plan.rank] = StageSlot(plan.role, local=True)

    def add(self, ranks: Sequence[RankPlan]) -> None:
        self.start(ranks)

    def remove(self, role: Role, rank: int) -> None:
        self._slots.pop((role, rank)).close()

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        self._queue.append((role, rank, method, args, payloads))

    def next(self, timeout: float) -> Answer | None:
        if not self._queue:
            return None
        role, rank, method, args, payloads = self._queue.popleft()
        value, payload = self._slots[role, rank].call(method, args, payloads)
        return Answer(role, rank, method, value, payload=payload)

    def wake(self) -> None:
        """Nothing ever waits here."""

    def close(self) -> None:
        self._queue.clear()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
