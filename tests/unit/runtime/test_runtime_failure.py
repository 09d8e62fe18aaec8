"""Who is told as the cause when several processes fail, and what Ray's exceptions become."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from flowtrain.config.schema import ClusterConfig
from flowtrain.errors import DataError, LostProcessError, PeerError, PlanError
from flowtrain.plan import RankPlan
from flowtrain.runtime import cluster
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.executor import Answer
from flowtrain.runtime.failure import true_cause
from flowtrain.runtime.local import LocalExecutor
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.types import Role

LOST = LostProcessError("producer 0 died")
UNREACHABLE = LostProcessError("the process that holds the segment is out of reach")
BAD_ROW = DataError("row 7 cannot be used")
BUG = KeyError("x")
ECHO = PeerError("sum of gradients failed")


class Told:
    """An executor whose answers are known beforehand."""

    def __init__(self, errors: Sequence[BaseException | None]) -> None:
        self.answers = deque(answer_of(error) for error in errors)

    def start(self, ranks: Sequence[RankPlan]) -> None:
        raise AssertionError("nothing is started after a failure")

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        raise AssertionError("nothing is sent after a failure")

    def next(self, timeout: float) -> Answer | None:
        return self.answers.popleft() if self.answers else None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def answer_of(error: BaseException | None) -> Answer:
    return Answer(Role.CONSUMER, 0, "reduce", None, error, died=error is LOST)


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ((ECHO, LOST, BUG), LOST),
        ((ECHO, BAD_ROW, None), BAD_ROW),
        ((ECHO, BUG), BUG),
        ((BUG, BAD_ROW, LOST), LOST),
        ((ECHO,), ECHO),
        ((UNREACHABLE, ECHO, LOST), LOST),
        ((UNREACHABLE, BAD_ROW), UNREACHABLE),
    ],
)
def test_the_cause_is_found_in_whatever_order_failures_are_told(
    errors: tuple[BaseException | None, ...], cause: BaseException
) -> None:
    for first, *others in permutations(errors):
        if first is not None:
            assert true_cause(answer_of(first), Told(others), grace_seconds=0.05).error is cause


def test_a_lost_process_ends_the_search_at_once() -> None:
    told = Told([ECHO])
    assert true_cause(answer_of(LOST), told, grace_seconds=60).error is LOST
    assert len(told.answers) == 1


def test_the_process_that_died_is_told_and_not_the_one_that_noticed() -> None:
    noticed = Answer(Role.CONSUMER, 1, "train", None, PeerError("sum of gradients failed"))
    died = Answer(Role.PRODUCER, 0, "watch", None, LOST, died=True)
    told = Told([])
    told.answers.append(died)
    assert true_cause(noticed, told, grace_seconds=60) == (LOST, (Role.PRODUCER, 0))
    assert true_cause(answer_of(UNREACHABLE), Told([]), grace_seconds=0.05).dead is None, "told by a process that lives"


def test_one_process_tells_its_own_failure_at_once() -> None:
    executor = LocalExecutor()
    executor.start([RankPlan(Role.CONSUMER, 0, "cpu", 1)])
    executor.submit(Role.CONSUMER, 0, "attach", {})
    with pytest.raises(AttributeError, match="pool"):  # there is no stage yet
        executor.next(1.0)
    executor.close()


@pytest.fixture
def executor() -> RayExecutor:
    """Never started: what a Ray exception means does not depend on it."""
    return RayExecutor(Cluster(ClusterConfig()), start_timeout_seconds=1.0)


def test_a_stage_s_own_error_comes_through_as_it_is(executor: RayExecutor) -> None:
    wrapped = RayTaskError("call", "Traceback …", DataError("row 7 cannot be used"))
    for error in (wrapped, wrapped.as_instanceof_cause()):
        told = executor._translate(error, Role.PRODUCER, 1, "encode")
        assert type(told) is DataError
        assert str(told) == "row 7 cannot be used"
        assert "encode of producer 1" in told.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        (
            RayActorError,
            "Worker unexpectedly exits with a connection error code 2. End of file.",
            "crashed in native code",
        ),
        (
            RayActorError,
            "Task was killed due to the node running low on memory.",
            "low on memory; lower packing.max_tokens",
        ),
        (
            OutOfMemoryError,
            "3 worker(s) were killed. Memory on the node (IP: 10.0.0.1) was 22.55GB used / 23.54GB limit (0.957890)",
            "low on memory (22.55GB used / 23.54GB limit by all programs); lower packing.max_tokens",
        ),
        (RayActorError, "The actor died because its node has died. Node Id: 12", "its node is gone"),
        (RayActorError, "The actor is dead.", "The actor is dead.; go on with --resume"),
    ],
)
def test_a_dead_actor_is_a_lost_process_with_a_way_on(
    executor: RayExecutor, kind: type[RayError], said: str, told: str
) -> None:
    given = kind(error_msg=said) if kind is RayActorError else kind(said)
    error = executor._translate(given, Role.CONSUMER, 0, "train")
    assert isinstance(error, LostProcessError)
    assert told in str(error)
    assert str(error).startswith("consumer 0 died while idle: ")


def test_ray_tells_the_process_of_an_actor_that_did_not(executor: RayExecutor) -> None:
    """Killed while it starts, an actor has said nothing of itself."""
    context = ActorDiedErrorContext(
        error_message="Worker unexpectedly exits with a connection error code 2. End of file.",
        actor_id=os.urandom(16),
        class_name="StageActor",
        pid=4711,
    )
    error = executor._translate(ActorDiedError(context), Role.PRODUCER, 1, "watch")
    assert str(error).startswith("producer 1 (pid 4711) died while idle: it was killed")


def test_a_cluster_that_does_not_answer_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(PlanError, match=rf"cluster.address: {address} cannot be joined; .*refused"):
        Cluster(ClusterConfig(address=address)).start([])


def test_something_else_that_listens_there_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PROBE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PlanError, match=rf"cluster.address: {address} cannot be joined; .*no answer within 0.5 s"):
            Cluster(ClusterConfig(address=address)).start([])
