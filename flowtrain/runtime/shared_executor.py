"""Many ranks in few processes, a thread each: ranks that mostly wait, such as emulated devices.

submit ──number──▶ SharedActor.call ──▶ lane of the rank ──its thread──▶ slot.call ──▶ answer
                                          └ orders in the order of their numbers, whatever order Ray starts them in

Both sides of a colocated rank have one lane: they take turns.

A process that is lost takes all its ranks along; nothing else differs from a process for each rank.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.plan import RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.guard import die_with
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.types import Role

Rank = tuple[Role, int]

Order = tuple[Rank, int, Rank, str, Sequence[Any]]
"""Lane, number, rank, method and its arguments. One value, since Ray encodes every argument by itself."""


class Slot(Protocol):
    """A rank's place for a stage (`flowtrain.runtime.stages.StageSlot`)."""

    def call(self, method: str, args: Sequence[Any], payloads: Sequence[Any]) -> tuple[Any, Any]:
        """The method's answer, and for `read` the payload block beside it."""

    def close(self) -> None:
        """Give back everything; idempotent."""


class _Lane:
    """The thread of a rank, and orders that came before those which precede them."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._early: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}
        self._next = 0

    def put(self, number: int, work: Callable[[], Any]) -> Future[Any]:
        """Called in the event loop's thread only."""
        future: Future[Any] = Future()
        self._early[number] = (work, future)
        while self._next in self._early:
            self.thread.submit(_run, *self._early.pop(self._next))
            self._next += 1
        return future


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class SharedActor:
    """`make_slot(role)`: called for each rank when its first order comes; `lane`: the rank whose thread works."""

    def __init__(self, make_slot: Callable[[Role], Slot], driver_pid: int, driver_host: str) -> None:
        die_with(driver_pid, driver_host)
        self._make_slot = make_slot
        self._slots: dict[Rank, Slot] = {}
        self._lanes: dict[Rank, _Lane] = {}

    async def call(self, order: Order, *payloads: Any) -> Any:
        return (await self._ordered(order, payloads))[0]

    @ray.method(num_returns=2)
    async def read(self, order: Order) -> tuple[Any, Any]:
        return await self._ordered(order, ())

    async def drop(self, key: Rank) -> None:
        """A rank with a lane of its own, and no order left to answer, leaves."""
        lane = self._lanes.pop(key)
        lane.thread.submit(self._slots.pop(key).close)
        lane.thread.shutdown(wait=False)

    async def clear(self) -> None:
        """All ranks leave: those of the next run may be others."""
        lanes, slots = list(self._lanes.values()), list(self._slots.values())
        self._lanes, self._slots = {}, {}
        for lane in lanes:
            lane.thread.shutdown(wait=False)
        for slot in slots:
            slot.close()

    async def pid(self) -> int:
        return os.getpid()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def _ordered(self, order: Order, payloads: Sequence[Any]) -> tuple[Any, Any]:
        lane, number, key, method, args = order
        if key not in self._slots:
            self._slots[key] = self._make_slot(key[0])
        if lane not in self._lanes:
            self._lanes[lane] = _Lane("-".join(map(str, lane)))
        work = partial(self._slots[key].call, method, args, payloads)
        answer: tuple[Any, Any] = await asyncio.wrap_future(self._lanes[lane].put(number, work))
        return answer


class SharedExecutor(RayExecutor):
    """`place_of(rank)`: its process, named like one of its ranks, and its lane; `make_slot`: as in `SharedActor`."""

    def __init__(
        self,
        cluster: Cluster,
        start_timeout_seconds: float,
        place_of: Callable[[Rank], tuple[Rank, Rank]],
        make_slot: Callable[[Role], Slot],
    ) -> None:
        super().__init__(cluster, start_timeout_seconds)
        self.place_of = place_of
        self.make_slot = make_slot
        self._sent: Counter[Rank] = Counter()

    def start(self, ranks: Sequence[RankPlan]) -> None:
        ray.get([actor.clear.remote() for actor in self._actors.values()], timeout=self.start_timeout_seconds)
        self._sent.clear()
        super().start(ranks)

    @property
    def pids(self) -> dict[Rank, int]:
        """Of the processes."""
        return dict(self._pids)

    def remove(self, role: Role, rank: int) -> None:
        assert not self._unanswered.get((role, rank)), f"{role} {rank} is to end {self._doing(role, rank)}"
        self._actors[self._host((role, rank))].drop.remote((role, rank))
        del self._sent[role, rank]

    def _host(self, key: Rank) -> Rank:
        return self.place_of(key)[0]

    def _call(self, key: Rank, method: str, args: Sequence[Any], payloads: Sequence[Any]) -> tuple[Any, Any]:
        process, lane = self.place_of(key)
        actor, order = self._actors[process], (lane, self._sent[lane], key, method, args)
        self._sent[lane] += 1
        if method == "read":
            value, payload = actor.read.remote(order)
            return value, payload
        return actor.call.remote(order, *payloads), None

    def _place(self, plan: RankPlan) -> Any:
        """Its ranks wait most of the time: a process takes no core of its own."""
        node = NodeAffinitySchedulingStrategy(self.cluster.nodes[plan.node].id, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": node}
        actor_class = ray.remote(SharedActor).options(**options)
        return actor_class.remote(self.make_slot, os.getpid(), os.uname().nodename)
