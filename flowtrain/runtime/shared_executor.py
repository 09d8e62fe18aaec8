"""Many ranks in few processes, a thread each: ranks that mostly wait, such as emulated devices.

submit ──▶ SharedActor.call in the lane of the rank ──its thread──▶ slot.call ──▶ answer
           └ a lane is a concurrency group of one thread: Ray executes its calls in the order in which they are sent

Both sides of a colocated rank have one lane: they take turns.

A process that is lost takes all its ranks along; nothing else differs from a process for each rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.plan import RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.guard import die_with
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.types import Role

Rank = tuple[Role, int]

LANES = 64
"""Threads of a process for its ranks; they exist from its start, since a later run may have more ranks in it."""

Order = tuple[Rank, str, Sequence[Any]]
"""Rank, method and its arguments. One value, since Ray encodes every argument by itself."""


class Slot(Protocol):
    """A rank's place for a stage (`flowtrain.runtime.stages.StageSlot`)."""

    def call(self, method: str, args: Sequence[Any], payloads: Sequence[Any]) -> tuple[Any, Any]:
        """The method's answer, and for `read` the payload block beside it."""

    def close(self) -> None:
        """Give back everything; idempotent."""


class SharedActor:
    """`make_slot(role)`: called for each rank when its first order comes. `call`, `read` and `drop` are for lanes."""

    def __init__(self, make_slot: Callable[[Role], Slot], driver_pid: int, driver_host: str) -> None:
        die_with(driver_pid, driver_host)
        self._make_slot = make_slot
        self._slots: dict[Rank, Slot] = {}

    def call(self, order: Order, *payloads: Any) -> Any:
        return self._done(order, payloads)[0]

    @ray.method(num_returns=2)
    def read(self, order: Order) -> tuple[Any, Any]:
        return self._done(order, ())

    def drop(self, key: Rank) -> None:
        """A rank leaves."""
        self._slots.pop(key).close()

    def clear(self) -> None:
        """All ranks leave: those of the next run may be others."""
        slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            slot.close()

    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        threading.Event().wait()

    def _done(self, order: Order, payloads: Sequence[Any]) -> tuple[Any, Any]:
        key, method, args = order
        if key not in self._slots:
            self._slots[key] = self._make_slot(key[0])
        return self._slots[key].call(method, args, payloads)


class SharedExecutor(RayExecutor):
    """`place_of(rank)`: its process, named like one of its ranks, and the number of its lane there, below `LANES`;
    `make_slot`: as in `SharedActor`."""

    def __init__(
        self,
        cluster: Cluster,
        start_timeout_seconds: float,
        place_of: Callable[[Rank], tuple[Rank, int]],
        make_slot: Callable[[Role], Slot],
    ) -> None:
        super().__init__(cluster, start_timeout_seconds)
        self.place_of = place_of
        self.make_slot = make_slot

    def start(self, ranks: Sequence[RankPlan]) -> None:
        ray.get([actor.clear.remote() for actor in self._actors.values()], timeout=self.start_timeout_seconds)
        super().start(ranks)

    @property
    def pids(self) -> dict[Rank, int]:
        """Of the processes."""
        return dict(self._pids)

    def remove(self, role: Role, rank: int) -> None:
        assert not self._unanswered.get((role, rank)), f"{role} {rank} is to end {self._doing(role, rank)}"
        self._in_lane((role, rank), "drop").remote((role, rank))

    def _host(self, key: Rank) -> Rank:
        return self.place_of(key)[0]

    def _call(self, key: Rank, method: str, args: Sequence[Any], payloads: Sequence[Any]) -> tuple[Any, Any]:
        order = (key, method, args)
        if method == "read":
            value, payload = self._in_lane(key, "read").remote(order)
            return value, payload
        return self._in_lane(key, "call").remote(order, *payloads), None

    def _in_lane(self, key: Rank, name: str) -> Any:
        process, lane = self.place_of(key)
        return getattr(self._actors[process], name).options(concurrency_group=_lane(lane))

    def _place(self, plan: RankPlan) -> Any:
        """Its ranks wait most of the time: a process takes no core of its own."""
        node = NodeAffinitySchedulingStrategy(self.cluster.nodes[plan.node].id, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": node}
        lanes = {_lane(number): 1 for number in range(LANES)}
        actor_class = ray.remote(concurrency_groups={"watch": 1, **lanes})(SharedActor).options(**options)
        return actor_class.remote(self.make_slot, os.getpid(), os.uname().nodename)


def _lane(number: int) -> str:
    assert number < LANES, f"lane {number} of a process that has {LANES}"
    return f"lane-{number}"
