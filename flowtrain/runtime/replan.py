"""Another number of producers while the run goes on, at a boundary between two steps.

    drift ─▶ new processes start and load libraries, while the run goes on
                       │ ready                   steps < S by the old plan       steps ≥ S by the new one
    replayed log ──────┴─▶ decide: S, logged; step S and later are held ──drained──▶ carry_out ──▶ held no longer

| `carry_out` | trainable encoder | frozen encoder |
|---|---|---|
| hand_over | producer 0 writes parameters and moments, as for a checkpoint | – |
| open_store; regroup, configure | all meet in a group of the new size; new ones are built | new ones are built |
| restore | the new ones read what was saved | – |
| attach or detach | consumers reach the new segments, or let go of those that leave | the same |
| remove | producers that leave are ended: they hold nothing | the same |

Those who stay keep their process, parameters and segment. The number of producers never enters packs (C1): step S is
the first of which nothing was sent (frozen), or composed (trainable: a unit's producer is fixed there), so no row is
lost, repeated or moved, and a log that names S and the number repeats the run. Every wait is one of the controller's: a
lost process ends the run with its cause, and a signal is answered when the change is done.

Invariants: one change at a time; while it is carried out no order of a step is in flight.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from flowtrain.allocator.drift import Drift, Expected, Rule
from flowtrain.config.loading import config_to_json
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.packing import CostModel
from flowtrain.packing.compose import Composer
from flowtrain.plan import Layout, Plan, RankPlan
from flowtrain.runtime.decisions import ReplayLog
from flowtrain.runtime.drift_watch import DriftWatch
from flowtrain.runtime.executor import Answer, Executor, StageSpec
from flowtrain.runtime.flow import Flow
from flowtrain.runtime.ledger import Ledger
from flowtrain.runtime.owners import new_owner, owner_ids, producer_owners
from flowtrain.shapes import ModelShape
from flowtrain.telemetry.metrics import PLAN_DRIFT, PLAN_PRODUCERS, PLAN_PROPOSAL
from flowtrain.telemetry.registry import Metric
from flowtrain.types import Pack, Role, Step

Rank = tuple[Role, int]
Calls = Mapping[Rank, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """From `step` on there are `producers` producers."""

    step: int
    producers: int


class Caller(Protocol):
    """What a change needs of the controller."""

    executor: Executor
    flow: Flow
    ledger: Ledger

    def send(self, calls: Calls) -> None:
        """Make these calls; nobody waits for them."""

    def ask(self, calls: Calls) -> dict[Rank, Any]:
        """Make these calls and wait for all answers."""


def make_replan(
    config: Config,
    plan: Plan,
    shape: ModelShape,
    run_dir: Path,
    composer: Composer,
    reduced_roles: frozenset[Role],
    log: ReplayLog | None = None,
    expected: Expected | None = None,
) -> Replan:
    """What `allocation.replan` asks for; `log`: what the run repeats instead, from the composer's step on; `expected`:
    what the plan was made for, without which the first window must do."""
    allocation = config.allocation
    if log is not None or allocation.replan == "off" or plan.placement == "colocated":
        replayed = [] if log is None else [Change(*change) for change in log.replans(composer.step + 1)]
        _check_replayed(plan, replayed)
        return Replan(config, plan, run_dir, composer, reduced_roles, replayed=replayed)
    number, consumers = len(plan.producers.ranks), plan.consumers.ranks
    on_cpu = all(rank.device == "cpu" for rank in (*plan.producers.ranks, *consumers))
    most = number + len(plan.spare) if allocation.replan == "auto" else allocation.max_producers or 2 * number
    rule = Rule(
        max_producers=max(most, number),
        num_consumers=plan.consumers.layout.dp_degree,
        cores=plan.cpus if on_cpu else None,
        window=allocation.drift_window,
        threshold_percent=allocation.drift_percent,
    )
    flops = CostModel.from_shape(shape, config.frozen, config.cut)

    def work(pack: Pack) -> tuple[float, float]:
        return flops.real(flops.encode_cost(pack.samples)), flops.real(flops.pack_cost(pack.samples))

    drift = Drift(rule, number, expected)
    watch = DriftWatch(drift, plan.consumers.layout.dp_degree, config.trainable_encoder, work)
    return Replan(config, plan, run_dir, composer, reduced_roles, watch)


def _check_replayed(plan: Plan, changes: Iterable[Change]) -> None:
    there = len(plan.producers.ranks) + len(plan.spare)
    most = max((change.producers for change in changes), default=there)
    if most > there:
        raise PlanError(
            f"the log that is replayed comes to {most} producers and the plan has room for {there}: set "
            f"allocation.replan: auto and allocation.max_producers: {most} or more, on nodes with as many cores"
        )


class Replan:
    """`replayed`: changes of a log, in which case nothing measured is used. `watch` None: nothing is proposed."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: Path,
        composer: Composer,
        reduced_roles: frozenset[Role],
        watch: DriftWatch | None = None,
        replayed: Iterable[Change] = (),
    ) -> None:
        self.config = config
        self.plan = plan
        self.run_dir = run_dir
        self.composer = composer
        self.reduced_roles = reduced_roles
        self.watch = watch
        self.owners = list(producer_owners(plan))
        self._ahead = deque(sorted(replayed, key=lambda change: change.step))
        self._wanted: int | None = None
        self._starting: set[Rank] = set()
        self._joining: list[int] = []
        self._next: Change | None = None
        self._changing = False

    @property
    def num_producers(self) -> int:
        return len(self.owners)

    # --- what the controller tells ------------------------------------------------------------------------------------

    def composing(self, step: int) -> None:
        """The next step is about to be composed: its units are given to the producers that there will be."""
        number = self.producers_at(step)
        if self.composer.spec.num_producers != number:
            self.composer.spec = replace(self.composer.spec, num_producers=number)

    def composed(self, step: Step) -> None:
        if self.watch is not None:
            self.watch.composed(step)

    def saw(self, answer: Answer, value: Any) -> None:
        """An answer has come; `value`: what of it is told."""
        if answer.method == "load_modules":
            self._starting.discard((answer.role, answer.rank))
        elif self.watch is not None:
            self.watch.saw(value)

    def recorded(self, step: int, caller: Caller) -> dict[Metric, Any]:
        """A step is over; what its record says of the plan."""
        if self.watch is None:
            return {}
        verdict = self.watch.recorded(step)
        if (proposal := verdict.proposal) is not None:
            caller.ledger.proposed(step, self.num_producers, proposal, verdict.drift_percent or 0.0)
            if self.config.allocation.replan == "auto" and self._next is None and self._wanted is None:
                self._wanted = proposal.producers
                self._start(proposal.producers, caller)
        return {
            PLAN_PRODUCERS: self.num_producers,
            PLAN_DRIFT: verdict.drift_percent,
            PLAN_PROPOSAL: None if proposal is None else proposal.producers,
        }

    # --- what the controller asks -------------------------------------------------------------------------------------

    def producers_at(self, step: int) -> int:
        """Producers by which `step` is composed and run, as far as is decided."""
        changes = [change for change in (self._next, *self._ahead) if change is not None and change.step <= step]
        return changes[-1].producers if changes else self.num_producers

    def ranks_at(self, step: int, others: frozenset[Role] = frozenset()) -> frozenset[Rank]:
        """The ranks that reduce and update at the end of `step`, and those of other sides."""
        peers = len(self.plan.producers.ranks) // len(self.plan.producers.leading)
        sides = {Role.PRODUCER: self.producers_at(step) * peers, Role.CONSUMER: len(self.plan.consumers.ranks)}
        return frozenset((role, rank) for role in self.reduced_roles | others for rank in range(sides[role]))

    def due(self, caller: Caller, composed: int, updating: bool) -> bool:
        """Whether a change can be carried out now; decides on one that has become possible. `composed`: so many steps
        are, `updating`: whether the update of one is under way."""
        if self._changing:
            return False
        self._follow(caller)
        if self._next is None and self._wanted is not None and not self._starting:
            first = composed + 1 if self.config.trainable_encoder else caller.flow.first_unbegun
            self._decide(Change(first, self._wanted), caller)
            self._wanted = None
        if self._next is None:
            return False
        # Once step S is composed, the evaluation before it is, too: what is left is what comes behind the change.
        return composed >= self._next.step and caller.flow.drained and not updating

    # --- the change ---------------------------------------------------------------------------------------------------

    def _follow(self, caller: Caller) -> None:
        """Decide on the next change of the log, where none is under way."""
        if self._next is None and self._ahead:
            self._start(self._ahead[0].producers, caller)
            self._decide(self._ahead.popleft(), caller)

    def _decide(self, change: Change, caller: Caller) -> None:
        caller.flow.hold(change.step)
        caller.ledger.replanning(change.step, self.num_producers, change.producers)
        self._next = change

    def _start(self, producers: int, caller: Caller) -> None:
        new = self._ranks(range(self.num_producers, producers))
        self._starting = {(rank.role, rank.rank) for rank in new}
        self._joining = []
        for rank in new:
            taken = [*self.owners, *self._joining, *owner_ids(self.plan).values()]
            self._joining.append(new_owner(rank.node, taken))
        caller.executor.add(new)
        huge_pages = self.config.pool.huge_pages
        segments = ((rank, owner) for rank, owner in zip(new, self._joining, strict=True) if rank.segment_bytes)
        caller.send({(r.role, r.rank): ("reserve", owner, r.segment_bytes, huge_pages) for r, owner in segments})
        caller.send(dict.fromkeys(self._starting, ("load_modules",)))

    def carry_out(self, caller: Caller) -> None:
        """The boundary has come."""
        assert self._next is not None
        self._changing = True
        try:
            before, after = self.num_producers, self._next.producers
            if after > before:
                reports = self._add(caller, before, after)
            else:
                reports = {}
                self._remove(caller, before, after)
            caller.flow.resize(self.owners)
            if self.watch is not None:
                self.watch.drift.changed(after)
            caller.ledger.replanned(after, reports)
            self._next = None
            self._follow(caller)  # before its step can begin
        finally:
            self._changing = False

    def _add(self, caller: Caller, before: int, after: int) -> dict[Rank, Any]:
        version = caller.flow.version
        folder = self.run_dir / "replan" / f"step-{version}"
        staying, new = self._keys(range(before)), self._ranks(range(before, after))
        config_json = config_to_json(self.config)
        weights_dir = caller.ask({(Role.CONSUMER, 0): ("prepare", config_json)})[Role.CONSUMER, 0]
        store = None
        calls: dict[Rank, tuple[Any, ...]] = {}
        if self._trains:
            folder.mkdir(parents=True, exist_ok=True)
            caller.ask({(Role.PRODUCER, 0): ("hand_over", str(folder))})
            store = self._open_store(caller, after)
            calls = dict.fromkeys(staying, ("regroup", after, store))
        spread = self._spread((*self.plan.producers.ranks, *self.plan.consumers.ranks))
        for rank, owner in zip(new, self._joining, strict=True):
            self.owners.append(owner)
            spec = StageSpec(
                rank, Layout(dp_replicate=after), config_json, weights_dir, str(self.run_dir), owner, spread, store
            )
            calls[rank.role, rank.rank] = ("configure", spec)
        answers = caller.ask(calls)
        reports = {(rank.role, rank.rank): answers[rank.role, rank.rank] for rank in new}
        if self._trains:
            caller.ask({key: ("restore", str(folder), version) for key in reports})
            shutil.rmtree(folder.parent, ignore_errors=True)
        segments = {report.segment.owner: report.segment for report in reports.values()}
        caller.ask(dict.fromkeys(self._readers, ("attach", segments)))
        for owner, handle in segments.items():
            caller.flow.directory.add(owner, handle.bytes)
        return reports

    def _remove(self, caller: Caller, before: int, after: int) -> None:
        if self._trains:
            store = self._open_store(caller, after) if after > 1 else None
            caller.ask(dict.fromkeys(self._keys(range(after)), ("regroup", after, store)))
        leaving = self.owners[after:]
        caller.ask(dict.fromkeys(self._readers, ("detach", leaving)))
        del self.owners[after:]
        for owner, rank in zip(leaving, range(after, before), strict=True):
            caller.flow.directory.remove(owner)
            caller.executor.remove(Role.PRODUCER, rank)

    def _open_store(self, caller: Caller, world_size: int) -> Any:
        timeout = max(self.config.cluster.start_timeout_seconds, 30.0)
        spread = self._spread(self._ranks(range(world_size)))
        return caller.ask({(Role.PRODUCER, 0): ("open_store", world_size, timeout, spread)})[Role.PRODUCER, 0]

    @staticmethod
    def _spread(ranks: Iterable[RankPlan]) -> bool:
        return len({rank.node for rank in ranks}) > 1

    @property
    def _trains(self) -> bool:
        return Role.PRODUCER in self.reduced_roles

    @property
    def _readers(self) -> list[Rank]:
        """Consumers that read features."""
        side = self.plan.consumers
        return [(Role.CONSUMER, rank.rank) for rank in side.ranks if side.layout.begins(rank.rank)]

    @staticmethod
    def _keys(ranks: Iterable[int]) -> list[Rank]:
        return [(Role.PRODUCER, rank) for rank in ranks]

    def _ranks(self, ranks: Iterable[int]) -> list[RankPlan]:
        named = (*self.plan.producers.ranks, *self.plan.spare)
        return [named[rank] for rank in ranks]
