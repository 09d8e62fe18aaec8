"""One Ray actor per rank of the plan; answers arrive by callback, never by waiting on the driver (contract C7).

submit ──▶ actor.call.remote ──▶ ObjectRef.future() ──callback──▶ queue ──▶ next
watch  ──▶ actor.watch.remote: never answers; its failure tells at once that the process is gone, busy or not
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.errors import LostProcessError, PlanError
from flowtrain.plan import RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.executor import Answer
from flowtrain.runtime.guard import die_with
from flowtrain.runtime.ray_transport import SegmentServer, own_endpoint
from flowtrain.runtime.reservation import Reservation
from flowtrain.runtime.stages import StageSlot
from flowtrain.types import Role

GONE = (RayActorError, OutOfMemoryError, NodeDiedError)
"""What Ray says where an actor's process is no more. An actor ended for want of memory has an error of its own kind."""


class StageActor(SegmentServer):
    """Hosts a `StageSlot` for each of its roles, two where a rank is colocated: `work` runs their stages one call at a
    time, `control` answers while they are busy, to the controller and to consumers that read its segment through
    Ray."""

    def __init__(self, roles: Sequence[str], driver_pid: int, driver_host: str) -> None:
        die_with(driver_pid, driver_host)
        place = {"address": ray.util.get_node_ip_address(), "endpoint": own_endpoint()}
        self._slots = {role: StageSlot(Role(role), local=False, **place) for role in roles}

    @ray.method(concurrency_group="work")
    def call(self, role: str, method: str, args: tuple[Any, ...], *payloads: Any) -> Any:
        slot = self._slots[role]
        value = slot.call(method, args, payloads)[0]
        if role != Role.CONSUMER or len(self._slots) == 1:
            self.serve(slot.segment)
        return value

    @ray.method(concurrency_group="work", num_returns=2)
    def read(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        return self._slots[Role.READER].call("read", args, ())

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def watch(self) -> None:
        threading.Event().wait()


class RayExecutor:
    """Implements `flowtrain.runtime.executor.Executor`. Actors of an earlier run of the same shape are used again.

    `colocated`: producer and consumer of a rank share an actor. `room`: of every process that may start, in a cluster
    that is shared with others; None in one of our own.
    """

    def __init__(
        self, cluster: Cluster, start_timeout_seconds: float, colocated: bool = False, room: Reservation | None = None
    ) -> None:
        self.room = room
        self.cluster = cluster
        self.colocated = colocated
        self.start_timeout_seconds = start_timeout_seconds
        self._actors: dict[tuple[Role, int], Any] = {}
        self._pids: dict[tuple[Role, int], int] = {}
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._unanswered: dict[tuple[Role, int], deque[str]] = {}
        self._closing = False
        self._run = 0

    def start(self, ranks: Sequence[RankPlan]) -> None:
        wanted = {(plan.role, plan.rank): plan for plan in ranks}
        self._run += 1
        self._answers, self._unanswered = queue.SimpleQueue(), {}
        missing: dict[tuple[Role, int], RankPlan] = {}
        for key, plan in wanted.items():
            if self._host(key) not in self._actors:
                missing.setdefault(self._host(key), plan)
        for host, plan in missing.items():
            self._actors[host] = self._place(plan)
        deadline = time.monotonic() + self.start_timeout_seconds
        waiting = {self._actors[key].pid.remote(): key for key in missing}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                names = ", ".join(f"{role} {rank}" for role, rank in waiting.values())
                raise PlanError(
                    f"{names} did not start within {self.start_timeout_seconds:g} s: the cluster is too busy or lacks "
                    f"the resources; see {self.cluster.log_dir}, or raise cluster.start_timeout_seconds"
                )
            for ref in ready:
                host = waiting.pop(ref)
                try:
                    self._pids[host] = ray.get(ref)
                except GONE as error:
                    raise self._lost(missing[host].role, missing[host].rank, "while starting", error) from error
        for host, plan in missing.items():
            self._listen(self._actors[host].watch.remote(), None, plan.role, plan.rank, "watch")

    def _host(self, key: tuple[Role, int]) -> tuple[Role, int]:
        """The process of a rank, named after one of its ranks."""
        role, rank = key
        return (Role.PRODUCER, rank) if self.colocated and role is Role.CONSUMER else key

    def add(self, ranks: Sequence[RankPlan]) -> None:
        for plan in ranks:
            host = self._host((plan.role, plan.rank))
            if host not in self._actors:
                actor = self._actors[host] = self._place(plan)
                actor.pid.remote().future().add_done_callback(partial(self._note_pid, host))
                self._listen(actor.watch.remote(), None, plan.role, plan.rank, "watch")

    def remove(self, role: Role, rank: int) -> None:
        assert not self._unanswered.get((role, rank)), f"{role} {rank} is to end {self._doing(role, rank)}"
        with contextlib.suppress(Exception):
            ray.kill(self._actors.pop((role, rank)))
        self._pids.pop((role, rank), None)

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        value, payload = self._call((role, rank), method, args, payloads)
        self._listen(value, payload, role, rank, method)

    def _call(
        self, key: tuple[Role, int], method: str, args: Sequence[Any], payloads: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Where the answer will be, and for `read` the payload block beside it."""
        actor = self._actors[self._host(key)]
        if method == "read":
            value, payload = actor.read.remote(args)
            return value, payload
        return actor.call.remote(key[0].value, method, args, *payloads), None

    def next(self, timeout: float) -> Answer | None:
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Make a waiting `next` return None now; safe in a signal handler."""
        self._answers.put(None)

    def close(self) -> None:
        self._closing = True
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._actors.clear()
        if self.room is not None:
            with contextlib.suppress(Exception):
                self.room.close()

    def _place(self, plan: RankPlan) -> Any:
        actor_class = ray.remote(concurrency_groups={"work": 1, "control": 4})(StageActor)
        options = {
            "num_cpus": self.cluster.cpus_of(plan),
            "num_gpus": int(plan.on_gpu),
            "max_restarts": 0,
            "runtime_env": self.cluster.runtime_env,
            "scheduling_strategy": self.room.place_of(plan)
            if self.room is not None
            else NodeAffinitySchedulingStrategy(self.cluster.nodes[plan.node].id, soft=False),
        }
        roles = [
            role.value
            for role in (
                (Role.PRODUCER, Role.CONSUMER) if self.colocated and plan.role is Role.PRODUCER else (plan.role,)
            )
        ]
        return actor_class.options(**options).remote(roles, os.getpid(), os.uname().nodename)

    def _note_pid(self, key: tuple[Role, int], future: Future[int]) -> None:
        if future.exception() is None:
            self._pids[key] = future.result()

    def _listen(self, ref: Any, payload: Any, role: Role, rank: int, method: str) -> None:
        host = self._host((role, rank))
        run, actor = self._run, self._actors[host]
        if method != "watch":
            self._unanswered.setdefault((role, rank), deque()).append(method)

        def done(future: Future[Any]) -> None:
            if self._closing or (run != self._run and method != "watch"):
                return  # an answer to an earlier run of a shared executor
            if self._actors.get(host) is not actor:
                return  # its process was ended
            error = future.exception()
            if method != "watch" and not isinstance(error, GONE):
                self._unanswered[role, rank].remove(method)
            if error is None:
                self._answers.put(Answer(role, rank, method, future.result(), payload=payload))
            else:
                told, died = self._translate(error, role, rank, method), isinstance(error, GONE)
                self._answers.put(Answer(role, rank, method, None, told, died=died))

        ref.future().add_done_callback(done)

    def _translate(self, error: BaseException, role: Role, rank: int, method: str) -> BaseException:
        """The stage's own exception, or a `LostProcessError` naming the process."""
        if isinstance(error, RayTaskError):
            cause = error.cause if isinstance(error.cause, BaseException) else error
            cause.add_note(f"in {method} of {role} {rank} (pid {self._pids.get(self._host((role, rank)))}):\n{error}")
            return cause
        return self._lost(role, rank, self._doing(role, rank), error) if isinstance(error, GONE) else error

    def _lost(self, role: Role, rank: int, doing: str, error: BaseException) -> LostProcessError:
        """A process is gone. Where it has not told its id yet, Ray does, which gave it to the actor."""
        pid = self._pids.get(self._host((role, rank))) or _told_pid(error)
        name = f"{role} {rank}" if pid is None else f"{role} {rank} (pid {pid})"
        lost = LostProcessError(f"{name} died {doing}: {_reason(error)}")
        lost.add_note(f"Ray says: {error}")
        if said := self.cluster.last_words(pid):
            lost.add_note(f"the end of its log:\n{said}")
        return lost

    def _doing(self, role: Role, rank: int) -> str:
        """What a process was at: orders are executed as they were sent, so the oldest without an answer."""
        unanswered = self._unanswered.get((role, rank))
        return f"during {unanswered[0]}" if unanswered else "while idle"


def _told_pid(error: BaseException) -> int | None:
    """The process in what Ray says of an actor that died; None where it says nothing of one."""
    found = re.search(r"\bpid(?:: |=)(\d+)\b", str(error))
    return int(found[1]) if found else None


def _reason(error: BaseException) -> str:
    """Why an actor is gone, and what to do about it, as far as Ray can tell."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "low on memory" in text:
        used = re.search(r"was (\S+ used / \S+ limit)", text)
        memory = f" ({used[1]} by all programs)" if used else ""
        return (
            f"Ray ended it because its node ran low on memory{memory}; lower packing.max_tokens or pool.bytes, or end "
            f"other programs; go on with --resume"
        )
    if "node" in text.lower() and "died" in text and "unexpectedly exits" not in text:
        return "its node is gone; go on with --resume once the cluster is whole"
    if "is unavailable" in text:
        return "its process or its node is gone, the connection broke; go on with --resume"
    if "unexpectedly exits" in text or "connection error" in text:
        return (
            "it was killed or crashed in native code; if nobody did it, memory ran out (see dmesg): "
            "lower packing.max_tokens or pool.bytes; go on with --resume"
        )
    return f"{text[:300]}; go on with --resume"
