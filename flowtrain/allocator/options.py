"""What a module can do on one kind of node: its candidates that fit the memory, those that others beat left out.

    candidate_blocks ─▶ memory ≤ capacity ─▶ rates ─▶ not beaten ─▶ Options

A row is beaten by a faster one with as many devices that is no worse in what counts besides (`Keep`): packs a step,
where a trainable encoder elsewhere fills and drains the backbone; memory, where modules share devices. Rows of other
numbers of devices do not beat it: modules that share devices must all have the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flowtrain.allocator.candidates import WHOLE, Scope, candidate_blocks
from flowtrain.allocator.hardware import NodePool, NodeType
from flowtrain.allocator.load import CandidateTable, Floats, Integers, ModuleLoad
from flowtrain.allocator.throughput import Job, least_device_seconds, rates

MemoryModel = Callable[[ModuleLoad, CandidateTable, Job], Floats]
"""Bytes of the fullest device of a candidate, without the context of the device itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """`seconds` a sample (1 / rate), `shared_seconds` on the backbone's devices, `packs` a step"""

    table: CandidateTable
    devices: Integers
    seconds: Floats
    shared_seconds: Floats
    packs: Integers
    memory_bytes: Floats

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def points(self) -> Points:
        return Points(self.devices, self.seconds, self.shared_seconds, self.packs, self.memory_bytes)

    def take(self, rows: npt.NDArray[np.bool_]) -> Options:
        return Options(self.table.take(rows), *self.points.take(rows))


class Points(NamedTuple):
    """The columns of `Options` that decide which rows are kept."""

    devices: Integers
    seconds: Floats
    shared_seconds: Floats
    packs: Integers
    memory_bytes: Floats

    def take(self, rows: npt.NDArray[np.bool_]) -> Points:
        return Points(*(column[rows] for column in self))  # type: ignore[arg-type]


def capacity_bytes(node: NodeType, job: Job) -> float:
    """What modules may take of a device."""
    return (1.0 - job.memory_reserve) * node.memory_bytes - node.context_bytes


@dataclass(frozen=True, slots=True)
class Keep:
    """What counts besides speed. `joint`: packs and memory at once, else each by itself."""

    packs: bool = False
    memory: bool = False
    joint: bool = False
    everything: bool = False


def options(
    load: ModuleLoad,
    pool: NodePool,
    job: Job,
    memory: MemoryModel,
    keep: Keep,
    scope: Scope = WHOLE,
    most_seconds: float = np.inf,
) -> Options:
    """The module's options on this pool. `most_seconds`: slower ones are of no use."""
    capacity = capacity_bytes(pool.node, job)
    champions = _Champions(pool.devices, capacity, keep)
    if np.isfinite(most_seconds):
        least, recomputed = (
            int(least_device_seconds(load, pool.node, job, full) / most_seconds * (1.0 - ROUNDING))
            for full in (False, True)
        )
        scope = replace(scope, least=least, least_recomputed=recomputed)
    kept: list[Options] = []
    for block in candidate_blocks(load, pool, job.step_samples, job.sizes(load), scope):
        num = len(block)
        # On a CPU the memory of a process is that of its cores.
        used = np.broadcast_to(memory(load, block, job) / block.threads, num)
        room = used <= capacity
        fitting = int(np.count_nonzero(room))
        if not fitting:
            continue
        if 2 * fitting < num:
            block, used, num = block.take(room), used[room], fitting
            room = np.ones(num, dtype=bool)
        found = rates(load, block, pool.node, job)
        rate, packs = np.broadcast_to(found.rate, num), np.broadcast_to(found.packs, num)
        taken = np.broadcast_to(block.devices, num)
        rows = np.flatnonzero(room & (rate * most_seconds >= 1.0) if np.isfinite(most_seconds) else room & (rate > 0))
        shared = np.broadcast_to(found.shared_rate, num)
        points = Points(taken[rows], 1.0 / rate[rows], 1.0 / shared[rows], packs[rows], used[rows])
        unbeaten = champions.unbeaten(points)
        if unbeaten.any():
            points = points.take(unbeaten)
            kept.append(Options(block.take(rows[unbeaten]), *points))
            champions.update(points)
    if not kept:
        none = np.zeros(0, dtype=np.int64)
        return Options(CandidateTable.of([]), none, np.zeros(0), np.zeros(0), none, np.zeros(0))
    columns = map(np.concatenate, zip(*(piece.points for piece in kept), strict=True))
    joined = Options(CandidateTable.join([piece.table for piece in kept]), *columns)
    return joined.take(champions.unbeaten(joined.points))


ROUNDING = 1e-9
LEVELS = 16
"""Of memory, for each of which the fastest row is known."""


class _Champions:
    """The fastest rows so far, by devices, and by devices and memory; rows that one of them beats need not be kept.

    They beat no row wrongly; rows that they miss are left to the fronts.
    """

    def __init__(self, most: int, capacity: float, keep: Keep) -> None:
        self.keep = keep
        self.capacity = max(capacity, 1.0)
        self.seconds = np.full(most + 1, np.inf)
        self.packs = np.zeros(most + 1, dtype=np.int64)
        self.by_memory = np.full((LEVELS + 1, most + 1), np.inf)
        self.packs_by_memory = np.zeros((LEVELS + 1, most + 1), dtype=np.int64)

    def unbeaten(self, found: Points) -> npt.NDArray[np.bool_]:
        if self.keep.everything:
            return np.ones(len(found.devices), dtype=bool)
        beaten = found.seconds > self.seconds[found.devices]
        if self.keep.packs:
            beaten &= found.packs <= self.packs[found.devices]
        if self.keep.memory:
            level = np.minimum(found.memory_bytes / self.capacity * LEVELS, LEVELS).astype(np.int64)
            at = (level, found.devices)
            beaten_shared = found.shared_seconds > self.by_memory[at]
            if self.keep.joint:
                return ~(beaten_shared & (found.packs <= self.packs_by_memory[at]))
            beaten &= beaten_shared
        return ~beaten

    def update(self, found: Points) -> None:
        if self.keep.everything:
            return
        order = np.argsort(-found.seconds, kind="stable")  # where a place is written twice, the fastest comes last
        rows = order[found.seconds[order] < self.seconds[found.devices[order]]]
        self.seconds[found.devices[rows]] = found.seconds[rows]
        self.packs[found.devices[rows]] = found.packs[rows]
        if not self.keep.memory:
            return
        lowest = np.ceil(found.memory_bytes / self.capacity * LEVELS).astype(np.int64)
        seconds = found.shared_seconds
        order = np.argsort(-seconds, kind="stable")
        for level in range(int(lowest.min(initial=LEVELS + 1)), LEVELS + 1):
            within = order[lowest[order] <= level]
            rows = within[seconds[within] < self.by_memory[level, found.devices[within]]]
            self.by_memory[level, found.devices[rows]] = seconds[rows]
            self.packs_by_memory[level, found.devices[rows]] = found.packs[rows]
