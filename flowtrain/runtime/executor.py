"""How the controller calls stages: one small border, two implementations (`local`, `ray_executor`).

An executor places one stage per rank of the plan, sends it orders and hands back answers. Orders to one rank are
executed one after the other in the order of `submit`; nothing else is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowtrain.plan import Layout, RankPlan
from flowtrain.pool.segment import SegmentHandle
from flowtrain.telemetry.mfu import Peak
from flowtrain.telemetry.tables import ParameterRow
from flowtrain.types import Role


@dataclass(frozen=True, slots=True)
class StageSpec:
    """All that a process needs to build its stage; plain data, sent once.

    Attributes:
        rank_plan: role, rank, device, threads and segment bytes.
        layout: of its side; readers are copies.
        config_json: the resolved config.
        weights_dir: folder of the whole model's safetensors.
        run_dir: the run's folder.
        owner: id of its segment in the pool, None without one.
        spread: the run has processes on several nodes.
        store: (host, port) of the side's rendezvous, None for a side of one rank or one that needs no collective.
        shares_copies: of a consumer and its neighbours one sees what another has copied.
    """

    rank_plan: RankPlan
    layout: Layout
    config_json: str
    weights_dir: str
    run_dir: str
    owner: int | None = None
    spread: bool = False
    store: tuple[str, int] | None = None
    shares_copies: bool = False


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a process tells of itself once its stage is built."""

    peak: Peak | None = None
    parameters: tuple[ParameterRow, ...] = ()
    segment: SegmentHandle | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one order.

    Attributes:
        value: what the stage returned.
        error: why it failed; None when it did not.
        payload: a handle of the block read.
        died: the process is gone; `error` says how.
    """

    role: Role
    rank: int
    method: str
    value: Any
    error: BaseException | None = None
    payload: Any = None
    died: bool = False


class Executor(Protocol):
    """Processes of a run. Every wait has a time-out; a dead process shows as an `Answer` with a `LostProcessError`."""

    def start(self, ranks: Sequence[RankPlan]) -> None:
        """Places one process per rank; `PlanError` when they cannot all start in time."""

    def add(self, ranks: Sequence[RankPlan]) -> None:
        """Places more processes, beside those that run, and returns at once; their first orders wait for them."""

    def remove(self, role: Role, rank: int) -> None:
        """Ends one process that has no order left to answer; nothing is heard of it any more."""

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        """Sends an order; `payloads` are handles of earlier answers, resolved where the stage runs."""

    def next(self, timeout: float) -> Answer | None:
        """The next answer, or None after `timeout` seconds without one.

        Where all stages share this process a failure is raised as it is: nobody else's could be its cause.
        """

    def wake(self) -> None:
        """Makes a waiting `next` return None now; safe in a signal handler."""

    def close(self) -> None:
        """Ends every process that was started; idempotent."""
