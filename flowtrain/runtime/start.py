"""Brings the processes of a plan up, in the one order in which each has what it needs.

start ▶ reserve (segments of the pool, whose pages are made beside all that follows)
      ▶ look (several nodes: model, data and run folder are there)
      ▶ prepare (weights, consumer 0; the others import meanwhile) ▶ open_store (rank 0 of each side of several)
      ▶ configure (all at once) ▶ attach (consumers open the segments that they read) ▶ restore (from a checkpoint)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowtrain.config.loading import config_to_json
from flowtrain.config.schema import Config
from flowtrain.errors import LostProcessError
from flowtrain.mirror import is_url, shown
from flowtrain.plan import Layout, Plan, RankPlan
from flowtrain.runtime.executor import Executor, StageReport, StageSpec
from flowtrain.runtime.failure import true_cause
from flowtrain.runtime.nodes import check_seen, look, read_paths
from flowtrain.runtime.owners import owner_ids
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import Role

Rank = tuple[Role, int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run goes on: the folder and the number of updates in it."""

    folder: Path
    step: int


def all_ranks(plan: Plan) -> list[RankPlan]:
    """Every process of the plan, readers first (they are ready first)."""
    readers = [RankPlan(Role.READER, rank, "cpu", 1) for rank in range(plan.readers)]
    return [*readers, *plan.producers.ranks, *plan.consumers.ranks]


Ask = Callable[[dict[Rank, tuple[Any, ...]]], dict[Rank, Any]]
"""Calls by rank → answers."""


def start_stages(
    config: Config, plan: Plan, executor: Executor, run_dir: Path, checkpoint: Checkpoint | None, stop: StopRequest
) -> tuple[dict[Rank, StageReport], str | None]:
    """Start, configure, connect and restore every stage; returns what each tells of itself, and a sample as text."""
    timeout = max(config.cluster.start_timeout_seconds, 30.0)
    ask = partial(_ask, executor, timeout, stop)
    ranks = all_ranks(plan)
    executor.start(ranks)
    owners = owner_ids(plan)
    segment_bytes = {(rank.role, rank.rank): rank.segment_bytes for rank in ranks}
    reserve = {key: ("reserve", owner, segment_bytes[key], config.pool.huge_pages) for key, owner in owners.items()}
    ask(reserve)
    _check_nodes(config, ranks, ask, run_dir)
    config_json = config_to_json(config)
    first: dict[Rank, tuple[Any, ...]] = {(rank.role, rank.rank): ("load_modules",) for rank in ranks}
    first[Role.CONSUMER, 0] = ("prepare", config_json)
    weights_dir = ask(first)[Role.CONSUMER, 0]
    layouts = {
        Role.PRODUCER: plan.producers.layout,
        Role.CONSUMER: plan.consumers.layout,
        Role.READER: Layout(dp_replicate=plan.readers),
    }
    meeting = (plan.producers,) if plan.placement == "colocated" else (plan.producers, plan.consumers)
    open_store = {
        (side.role, 0): ("open_store", len(side.ranks), timeout, len({rank.node for rank in side.ranks}) > 1)
        for side in meeting
        if len(side.ranks) > 1
    }
    stores = ask(open_store)
    if plan.placement == "colocated" and stores:  # the processes of one side are those of the other
        stores[Role.CONSUMER, 0] = stores[Role.PRODUCER, 0]
    specs = {
        (rank.role, rank.rank): StageSpec(
            rank,
            layouts[rank.role],
            config_json,
            weights_dir,
            str(run_dir),
            owners.get((rank.role, rank.rank)),
            len({other.node for other in ranks}) > 1,
            stores.get((rank.role, 0)),
            rank.role is Role.CONSUMER and plan.consumers.shares_copies(rank.rank),
        )
        for rank in ranks
    }
    reports = ask({key: ("configure", spec) for key, spec in specs.items()})
    segments = {
        owners[key]: report.segment for key, report in reports.items() if key[0] is Role.PRODUCER and report.segment
    }
    text = ask({(Role.READER, 0): ("sample_text",)})[Role.READER, 0]
    for_consumers: dict[Rank, tuple[Any, ...]] = {}
    for rank in plan.consumers.ranks:
        if plan.consumers.layout.begins(rank.rank):
            copier = plan.consumers.copier(rank.rank)
            copies = None if copier is None else reports[Role.CONSUMER, copier].segment
            for_consumers[rank.role, rank.rank] = ("attach", segments, copies)
    ask(for_consumers)
    if checkpoint is not None:
        trained = [key for key in specs if key[0] is not Role.READER]
        ask({key: ("restore", str(checkpoint.folder), checkpoint.step) for key in trained})
    return reports, text


def _check_nodes(config: Config, ranks: list[RankPlan], ask: Ask, run_dir: Path) -> None:
    """What every node needs is there and the same (exit 4)."""
    paths = [*read_paths(config), run_dir / "decisions.jsonl"]
    wanted = [shown(path) for path in paths]
    joined = config.cluster.address is not None  # its processes may have another cache than the driver
    first = {rank.node: rank for rank in reversed(ranks) if rank.node or (joined and any(map(is_url, wanted)))}
    answers = ask({(rank.role, rank.rank): ("look", wanted) for rank in first.values()})
    here = look(wanted)
    for number, rank in sorted(first.items()):
        address, seen = answers[rank.role, rank.rank]
        check_seen(number, address, seen, here)


def _ask(executor: Executor, timeout: float, stop: StopRequest, calls: dict[Rank, tuple[Any, ...]]) -> dict[Rank, Any]:
    """Make these calls at once and wait for all answers; the first failure's true cause is raised.

    What a signal raises may be lost where it falls into a callback or a destructor, so `stop` is asked too.
    """
    for (role, rank), (method, *args) in calls.items():
        executor.submit(role, rank, method, *args)
    answers: dict[Rank, Any] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(calls):
        answer = executor.next(0.5)
        if stop.requested:
            raise stop.error()
        if answer is not None:
            if answer.error is not None:
                raise true_cause(answer, executor).error
            answers[answer.role, answer.rank] = answer.value
        elif time.monotonic() > deadline:
            method = next(iter(calls.values()))[0]
            raise LostProcessError(
                f"no answer to {method} within {timeout:g} s from {_names(calls.keys() - answers.keys())}; "
                f"raise cluster.start_timeout_seconds if the machine is slow"
            )
    return answers


def _names(ranks: Iterable[Rank]) -> str:
    return ", ".join(f"{role} {rank}" for role, rank in sorted(ranks))
