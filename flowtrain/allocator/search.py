"""From modules and a cluster to the best plan: enumerate, bound, solve (pure).

On a large cluster a coarse look (some numbers of replicas only) finds a plan that can be had; no module of a better one
is slower than that plan, so what is slower by `NEIGHBOUR_BOUND` is dropped as it is enumerated. The result is that of
the whole space, and what is kept holds the plan's neighbours too.
"""

from __future__ import annotations

from dataclasses import replace

from flowtrain.allocator.candidates import Scope
from flowtrain.allocator.options import Keep, MemoryModel, Options, options
from flowtrain.allocator.solve import Choice, Problem, Solution, solve
from flowtrain.allocator.throughput import crossings

LARGE = 48
"""Devices of a pool from which on a coarse look pays."""
NEIGHBOUR_BOUND = 1.15
"""A neighbour of the best plan that is slower by more than this factor is not looked for."""


def search(problem: Problem, memory: MemoryModel, scope: Scope | None = None) -> Solution | None:
    """The best plan of this scope (default: everything), with what it was found among; None where nothing fits."""
    scope = scope or Scope()
    bound = float("inf")
    if max(pool.devices for pool in problem.cluster) > LARGE:
        first = solve(problem, tables(problem, memory, replace(scope, coarse=True)))
        bound = bound if first is None else NEIGHBOUR_BOUND / first.rate
    among = tables(problem, memory, scope, bound)
    found = solve(problem, among)
    return None if found is None else replace(settle(problem, memory, found, scope), among=among)


def tables(
    problem: Problem, memory: MemoryModel, scope: Scope, most_seconds: float = float("inf")
) -> dict[tuple[int, int], Options]:
    return {
        (m, p): options(load, pool, problem.job, memory, problem.keep(m), scope, most_seconds)
        for m, load in enumerate(problem.loads)
        for p, pool in enumerate(problem.cluster)
    }


def settle(problem: Problem, memory: MemoryModel, found: Solution, scope: Scope) -> Solution:
    """Among candidates of the same number of devices that keep the plan's rate: fewest crossings, smallest degrees."""
    choices = []
    for choice in found.choices:
        group = found.partition[choice.group]
        alone = len(group) == 1
        choices.append(_settled(problem, memory, found, choice, scope) if alone else choice)
    slowest = list(found.group_seconds)
    for choice in choices:
        if len(found.partition[choice.group]) == 1:
            slowest[choice.group] = max(slowest[choice.group], choice.seconds)
    return replace(found, choices=tuple(choices), group_seconds=tuple(slowest))


def _settled(problem: Problem, memory: MemoryModel, found: Solution, choice: Choice, scope: Scope) -> Choice:
    pool = problem.cluster[choice.pool]
    here = replace(scope, devices=choice.candidate.devices)
    every = options(choice.load, pool, problem.job, memory, Keep(everything=True), here)
    allowed = found.allowed_seconds[choice.group]
    cross = crossings(every.table, pool.node.devices)
    best: tuple[tuple[float, ...], Choice] | None = None
    for row in range(len(every)):
        seconds, packs = float(every.seconds[row]), int(every.packs[row])
        if seconds > allowed or (choice.group == 0 and found.fill_seconds and packs < choice.packs):
            continue
        c = every.table[row]
        rank = (
            int(cross[row]),
            c.recompute,
            c.tp * c.pp * c.cp * c.ep,
            c.pp,
            c.tp,
            c.dp_shard,
            -c.pack_tokens,
            seconds,
        )
        if best is None or rank < best[0]:
            memory_bytes = float(every.memory_bytes[row])
            best = rank, replace(choice, candidate=c, seconds=seconds, packs=packs, memory_bytes=memory_bytes)
    return choice if best is None else best[1]
