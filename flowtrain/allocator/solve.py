"""The best plan, exactly: which modules share devices, on which kind of node, how many devices each, in which layout.

A *partition* of the modules into groups is a placement: one group is `colocated`, a group each is `disaggregated`, and
anything between is `mixed`. Groups work at the same time, modules of a group one after another. With y_g the seconds a
sample of group g (x_g of an encoder group, headroom included) and M the backbone's packs a step, a sample takes

    s = max over groups of y_g                                  nothing trains outside the backbone's group
    s = max(x*, y_backbone) + x* / M,  and s ≥ y_g              x* = slowest group of encoders that train elsewhere

since a step then waits for the first packs to be encoded and for the last ones to go back (fill and drain).

1. For each partition and each choice of node types: fronts of all groups (`fronts`).
2. Whether s can be had is monotone in s: point by point of the backbone's front, with s, y and M given, the others need
   so many devices. s is halved until two numbers are left; then the exact s of the best point is taken.
3. Of everything within `TIE` of the least s: fewest devices, then fewest node crossings, then the smaller degrees.

Lexicographic order: rate, devices, crossings. A partition or choice that cannot beat the best so far costs one look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from flowtrain.allocator.fronts import OUT_OF_REACH, Front, group_front, limit_bandwidth, need, staircase
from flowtrain.allocator.hardware import Cluster
from flowtrain.allocator.load import Candidate, Floats, Integers, ModuleLoad
from flowtrain.allocator.options import Keep, Options, capacity_bytes
from flowtrain.allocator.throughput import Job
from flowtrain.types import Role

TIE = 1e-9
"""Rates that differ by less are equal: then fewer devices decide."""
ROUNDS = 100

ANYWHERE = frozenset({"colocated", "disaggregated", "mixed"})

Group = tuple[int, ...]
Partition = tuple[Group, ...]
Table = Mapping[tuple[int, int], Options]
"""(module, pool) → its options there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one module does: `seconds` a sample by itself, `packs` a step on each replica."""

    load: ModuleLoad
    candidate: Candidate
    pool: int
    group: int
    seconds: float
    packs: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Solution:
    """`rate` in samples/s; `group_seconds` a sample of each group, headroom not included; `allowed_seconds` what it may
    take with the others as they are, the rate being the same; `among` the options it was found in, by module and pool,
    where whoever found it keeps them."""

    rate: float
    devices: int
    partition: Partition
    pools: tuple[int, ...]
    group_devices: tuple[int, ...]
    group_seconds: tuple[float, ...]
    allowed_seconds: tuple[float, ...]
    fill_seconds: float
    choices: tuple[Choice, ...]
    among: Table | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """Modules to place on a cluster; the backbone is the one consumer.

    `synchronous`: encoders that do not train wait for the step as well, as if they did.
    """

    loads: tuple[ModuleLoad, ...]
    cluster: Cluster
    job: Job
    placements: frozenset[str] = ANYWHERE
    synchronous: bool = False

    def __post_init__(self) -> None:
        assert sum(load.role is Role.CONSUMER for load in self.loads) == 1, "one backbone"

    @property
    def backbone(self) -> int:
        return next(n for n, load in enumerate(self.loads) if load.role is Role.CONSUMER)

    def partitions(self) -> list[Partition]:
        """Every way to share devices that the placements allow, the backbone's group first."""
        found = []
        for groups in _partitions(list(range(len(self.loads)))):
            ordered = sorted((tuple(group) for group in groups), key=lambda group: (self.backbone not in group, group))
            if self.placement(tuple(ordered)) in self.placements:
                found.append(tuple(ordered))
        return found

    def moved_bytes(self, group: Group) -> float:
        """Bytes a sample that a group sends or gets through the pool: those of its encoders, or of all elsewhere."""
        encoders = [m for m in range(len(self.loads)) if m != self.backbone]
        crossing = [m for m in encoders if m not in group] if self.backbone in group else group
        return sum(self.loads[m].pool_bytes * (1 + self.loads[m].gradient_returns) for m in crossing)

    def plan(
        self,
        partition: Partition,
        pools: tuple[int, ...],
        seconds: tuple[float, ...],
        choices: Sequence[Choice],
        allowed: tuple[float, ...] | None = None,
    ) -> Solution:
        """The plan of these choices, its rate by the formulas above; the backbone's group is the first."""
        packs = next(choice.packs for choice in choices if choice.load.role is Role.CONSUMER)
        slowed = [s * (1.0 + self.job.headroom) for s in seconds]
        waiting = [slowed[g] for g in range(1, len(partition)) if self.waits(partition[g])]
        others = [slowed[g] for g in range(1, len(partition)) if not self.waits(partition[g])]
        slowest = max(waiting, default=0.0)
        fill = slowest / packs
        devices = tuple(
            next(choice.candidate.devices for choice in choices if choice.group == g) for g in range(len(partition))
        )
        return Solution(
            rate=1.0 / max(max(slowest, seconds[0]) + fill, *others, 0.0),
            devices=sum(devices),
            partition=partition,
            pools=pools,
            group_devices=devices,
            group_seconds=seconds,
            allowed_seconds=allowed or seconds,
            fill_seconds=fill,
            choices=tuple(sorted(choices, key=lambda choice: self.loads.index(choice.load))),
        )

    def keep(self, module: int) -> Keep:
        """What counts of a module's options besides speed."""
        shared = any(module in group and len(group) > 1 for partition in self.partitions() for group in partition)
        elsewhere = any(self.waits(group) for partition in self.partitions() for group in partition[1:])
        packs = module == self.backbone and elsewhere
        return Keep(packs, shared, joint=packs and shared and len(self.loads) > 2)

    def waits(self, group: Group) -> bool:
        """Whether a step waits for this group of encoders to fill and drain."""
        return any(self.synchronous or self.loads[m].trains for m in group)

    def placement(self, partition: Partition) -> str:
        if len(partition) == 1:
            return "colocated"
        return "disaggregated" if len(partition) == len(self.loads) else "mixed"


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One partition on one choice of pools: fronts by group (the backbone's first), and which of them train."""

    partition: Partition
    pools: tuple[int, ...]
    fronts: tuple[Front, ...]
    trains: tuple[bool, ...]
    budgets: tuple[int, ...]
    headroom: float

    def groups(self, trains: bool) -> Iterator[int]:
        return (g for g in range(1, len(self.fronts)) if self.trains[g] == trains)

    def devices(self, seconds: float) -> tuple[Integers, Floats]:
        """For each point of the backbone's front: devices in all (OUT_OF_REACH: not to be had), and its bound on x*."""
        first = self.fronts[0]
        waits = any(self.trains[1:])
        if waits:
            bound = np.minimum(seconds / (1.0 + 1.0 / first.packs), first.packs * (seconds - first.seconds))
        else:
            bound = np.where(first.seconds <= seconds, seconds, 0.0)
        used = {pool: np.zeros(len(first), dtype=np.int64) for pool in set(self.pools)}
        used[self.pools[0]] += first.devices
        for g in range(1, len(self.fronts)):
            limit = bound if self.trains[g] else seconds
            used[self.pools[g]] += need(self.fronts[g], np.asarray(limit) / (1.0 + self.headroom))
        total = sum(used.values())
        reachable = bound > 0
        for pool, taken in used.items():
            reachable = reachable & (taken <= self.budgets[pool])
        return np.where(reachable, total, OUT_OF_REACH), bound

    def best(self, below: float) -> float | None:
        """Least seconds a sample, None unless it is at most `below`."""
        if not self._exact(below):
            return None
        high = self._exact(below)
        low = 0.0
        for _ in range(ROUNDS):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            found = self._exact(middle)
            if found:
                high = found
            else:
                low = middle
            if high - low <= 1e-14 * high:
                break
        return high

    def _exact(self, seconds: float) -> float:
        """Seconds of the fastest plan that `devices(seconds)` finds; 0.0 where there is none."""
        total, bound = self.devices(seconds)
        points = np.flatnonzero(total < OUT_OF_REACH)
        if not len(points):
            return 0.0
        first = self.fronts[0]
        x = np.zeros(len(points))
        floor = 0.0
        for g in range(1, len(self.fronts)):
            stairs = self.fronts[g]
            limit = (bound[points] if self.trains[g] else seconds) / (1.0 + self.headroom)
            at = np.searchsorted(-stairs.seconds, -np.asarray(limit), side="left")
            taken = stairs.seconds[at] * (1.0 + self.headroom)
            if self.trains[g]:
                x = np.maximum(x, taken)
            else:
                floor = max(floor, float(taken))
        step = np.maximum(x, first.seconds[points]) + x / first.packs[points]
        return float(max(step.min(), floor))


def solve(problem: Problem, table: Table) -> Solution | None:
    """The lexicographically best plan; None where nothing fits."""
    least = np.inf
    cases = []
    for case in _cases(problem, table):
        found = case.best(least * (1.0 - 1e-13) if np.isfinite(least) else 1e30)
        least = least if found is None else min(least, found)
        cases.append(case)
    if not np.isfinite(least):
        return None
    allowed = least * (1.0 + TIE)
    ranked = []
    for number, case in enumerate(cases):
        total, bound = case.devices(allowed)
        fewest = int(total.min(initial=OUT_OF_REACH))
        if fewest < OUT_OF_REACH:
            # Of points with equally few devices the fastest: crossings are settled among its candidates.
            equal = np.flatnonzero(total == fewest)
            point = int(equal[np.argmin(case.fronts[0].seconds[equal])])
            ranked.append((fewest, len(case.partition), number, point, float(bound[point])))
    fewest, _, number, point, bound_there = min(ranked)
    return _solution(problem, table, cases[number], point, bound_there, allowed)


def _cases(problem: Problem, table: Table) -> Iterator[_Case]:
    """Partitions with fewer groups first, all choices of pools."""
    cluster, job = problem.cluster, problem.job
    budgets = tuple(pool.devices for pool in cluster)
    fronts: dict[tuple[Group, int, bool, float], Front] = {}
    for partition in problem.partitions():
        trains = tuple(problem.waits(group) for group in partition)
        waits = any(trains[1:])
        for pools in product(range(len(cluster)), repeat=len(partition)):
            chosen = []
            for g, (group, pool) in enumerate(zip(partition, pools, strict=True)):
                keep_packs = waits and g == 0
                node = cluster[pool].node
                moved = problem.moved_bytes(group) / (node.network_bandwidth * node.efficiency.link)
                key = (group, pool, keep_packs, moved)
                if key not in fronts:
                    members = [table[m, pool] for m in group]
                    backbone = group.index(problem.backbone) if problem.backbone in group else None
                    capacity = capacity_bytes(node, job)
                    front = limit_bandwidth(group_front(members, backbone, capacity, keep_packs), moved)
                    fronts[key] = staircase(front, keep_packs)
                chosen.append(fronts[key])
            if all(len(front) for front in chosen):
                yield _Case(partition, pools, tuple(chosen), trains, budgets, job.headroom)


def _solution(problem: Problem, table: Table, case: _Case, point: int, bound: float, allowed: float) -> Solution:
    def limit_of(g: int) -> float:
        return (bound if case.trains[g] else allowed) / (1.0 + case.headroom)

    found = (np.searchsorted(-case.fronts[g].seconds, -limit_of(g), side="left") for g in range(1, len(case.fronts)))
    rows = [point, *map(int, found)]
    seconds = tuple(float(front.seconds[row]) for front, row in zip(case.fronts, rows, strict=True))
    waiting = [seconds[g] * (1.0 + case.headroom) for g in case.groups(trains=True)]
    fill = max(waiting, default=0.0) / int(case.fronts[0].packs[point])
    # Slower candidates may replace those of groups that nothing waits for, and the backbone's within what is left.
    allowed_here = [allowed - fill, *(seconds[g] if case.trains[g] else limit_of(g) for g in range(1, len(rows)))]
    choices = []
    for g, (group, pool, front, row) in enumerate(zip(case.partition, case.pools, case.fronts, rows, strict=True)):
        for place, module in enumerate(group):
            kept, at = table[module, pool], int(front.rows[place][row])
            choices.append(
                Choice(
                    problem.loads[module],
                    kept.table[at],
                    pool,
                    g,
                    float((kept.seconds if len(group) == 1 else kept.shared_seconds)[at]),
                    int(kept.packs[at]),
                    float(kept.memory_bytes[at]),
                )
            )
    return problem.plan(case.partition, case.pools, seconds, choices, tuple(allowed_here))


def _partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to part items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in _partitions(rest):
        yield [[first], *groups]
        for place in range(len(groups)):
            yield [*groups[:place], [first, *groups[place]], *groups[place + 1 :]]
