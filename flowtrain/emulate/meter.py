"""What the control plane costs: an executor around another one that counts calls, bytes and the controller's time.

    Controller ── submit ──▶ Meter ──▶ executor          between two `next` the controller is busy, within it it waits
               ◀── next ────       ◀──

Bytes are those of orders and answers as pickle writes them; handles of payload blocks count as what they are, handles.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flowtrain.plan import RankPlan
from flowtrain.runtime.executor import Answer, Executor
from flowtrain.types import Role

STEP_METHODS = frozenset({"read", "encode", "train", "backward", "reduce", "update"})
"""Calls of a step; the others belong to start, checkpoints and end."""


class Meter:
    """Implements `flowtrain.runtime.executor.Executor`. `sizes`: also weigh messages, which costs the controller time
    that is left out of `busy_seconds`.

    Attributes:
        calls: by method; `order_bytes` and `answer_bytes` the same.
        busy_seconds: of the controller, from an answer until it waits for the next one; `cpu_seconds`: of its thread.
    """

    def __init__(self, executor: Executor, sizes: bool = False) -> None:
        self.executor = executor
        self.sizes = sizes
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self.calls: Counter[str] = Counter()
        self.order_bytes: Counter[str] = Counter()
        self.answer_bytes: Counter[str] = Counter()
        self.answers = 0
        self.busy_seconds = self.cpu_seconds = 0.0
        self._weighing = self._weighing_cpu = 0.0
        self._since: float | None = None
        self._cpu_since = 0.0

    def start(self, ranks: Sequence[RankPlan]) -> None:
        self.executor.start(ranks)

    def add(self, ranks: Sequence[RankPlan]) -> None:
        self.executor.add(ranks)

    def remove(self, role: Role, rank: int) -> None:
        self.executor.remove(role, rank)

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        self.calls[method] += 1
        if self.sizes:
            self.order_bytes[method] += self._weigh(args)
        self.executor.submit(role, rank, method, *args, payloads=payloads)

    def next(self, timeout: float) -> Answer | None:
        if self._since is not None:
            self.busy_seconds += time.perf_counter() - self._since - self._weighing
            self.cpu_seconds += time.thread_time() - self._cpu_since - self._weighing_cpu
        answer = self.executor.next(timeout)
        self._since, self._cpu_since = time.perf_counter(), time.thread_time()
        self._weighing = self._weighing_cpu = 0.0
        if answer is not None:
            self.answers += 1
            if self.sizes:
                self.answer_bytes[answer.method] += self._weigh(answer.value)
        return answer

    def wake(self) -> None:
        self.executor.wake()

    def close(self) -> None:
        self.executor.close()

    @property
    def step_calls(self) -> int:
        """Calls that steps are made of."""
        return sum(number for method, number in self.calls.items() if method in STEP_METHODS)

    def _weigh(self, value: Any) -> int:
        since, cpu = time.perf_counter(), time.thread_time()
        num_bytes = len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        self._weighing += time.perf_counter() - since
        self._weighing_cpu += time.thread_time() - cpu
        return num_bytes
