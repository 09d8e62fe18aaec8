"""Policies: who decides how many devices each module gets. All choose the best layout within what they give (pure).

| name | devices of a module |
|---|---|
| `uniform` | the same for every module |
| `flops_proportional` | in proportion to its training FLOPs |
| `stage_balanced` | those with the shortest step when encoder and backbone wait for each other, like stages |
| `flow_matching` | those that match the rates of modules decoupled by the pool: `search` |

Where all modules share their devices there is nothing to divide, and the four agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Protocol

import numpy as np

from flowtrain.allocator.candidates import Scope
from flowtrain.allocator.options import MemoryModel, Options
from flowtrain.allocator.search import search, tables
from flowtrain.allocator.solve import Choice, Problem, Solution


class Policy(Protocol):
    """None where nothing that the policy would do fits."""

    def __call__(self, problem: Problem, memory: MemoryModel, scope: Scope) -> Solution | None: ...


def flow_matching(problem: Problem, memory: MemoryModel, scope: Scope) -> Solution | None:
    return search(problem, memory, scope)


def stage_balanced(problem: Problem, memory: MemoryModel, scope: Scope) -> Solution | None:
    found = search(replace(problem, synchronous=True), memory, scope)
    return None if found is None else replace(found, among=None)  # what waits for the step is another problem


def uniform(problem: Problem, memory: MemoryModel, scope: Scope) -> Solution | None:
    return _divided(problem, memory, scope, [1.0] * len(problem.loads))


def flops_proportional(problem: Problem, memory: MemoryModel, scope: Scope) -> Solution | None:
    return _divided(problem, memory, scope, [load.train_flops for load in problem.loads])


POLICIES: dict[str, Policy] = {
    "uniform": uniform,
    "stage_balanced": stage_balanced,
    "flops_proportional": flops_proportional,
    "flow_matching": flow_matching,
}
"""Name in `allocation.policy` → policy."""


def _divided(problem: Problem, memory: MemoryModel, scope: Scope, weights: Sequence[float]) -> Solution | None:
    """The best of all choices of node types when each type's devices are divided by the weights of its modules."""
    if problem.placements == {"colocated"} or len(problem.loads) == 1:
        return search(problem, memory, scope)
    table = tables(problem, memory, scope)
    best: Solution | None = None
    for pools in product(range(len(problem.cluster)), repeat=len(problem.loads)):
        rows: dict[int, int] = {}
        for number, pool in enumerate(problem.cluster):
            members = [m for m, chosen in enumerate(pools) if chosen == number]
            found = _rows([table[m, number] for m in members], [weights[m] for m in members], pool.devices)
            if found is None:
                break
            rows.update(zip(members, found, strict=True))
        else:
            plan = _plan(problem, table, pools, rows)
            best = plan if best is None or (plan.rate, -plan.devices) > (best.rate, -best.devices) else best
    return best


def _rows(members: Sequence[Options], weights: Sequence[float], budget: int) -> list[int] | None:
    """For each module the fastest option within its share of the budget; None where not all fit."""
    if not all(len(options) for options in members):
        return None
    fewest = [int(options.devices.min()) for options in members]
    if sum(fewest) > budget:
        return None
    exact = [budget * weight / sum(weights) for weight in weights]
    shares = [max(least, int(share)) for least, share in zip(fewest, exact, strict=True)]
    while sum(shares) > budget:
        most = max((m for m in range(len(shares)) if shares[m] > fewest[m]), key=lambda m: shares[m] - exact[m])
        shares[most] -= 1
    for m in sorted(range(len(shares)), key=lambda m: shares[m] - exact[m])[: budget - sum(shares)]:
        shares[m] += 1
    found = []
    for options, share in zip(members, shares, strict=True):
        within = np.flatnonzero(options.devices <= share)
        order = np.lexsort((options.devices[within], options.seconds[within]))
        found.append(int(within[order[0]]))
    return found


def _plan(
    problem: Problem, table: dict[tuple[int, int], Options], pools: Sequence[int], rows: dict[int, int]
) -> Solution:
    """Every module a group of its own, the backbone's first."""
    order = [problem.backbone, *(m for m in range(len(problem.loads)) if m != problem.backbone)]
    choices, seconds = [], []
    for g, m in enumerate(order):
        options, row = table[m, pools[m]], rows[m]
        taken = int(options.devices[row])
        node = problem.cluster[pools[m]].node
        moved = problem.moved_bytes((m,)) / (node.network_bandwidth * node.efficiency.link * taken)
        seconds.append(max(float(options.seconds[row]), moved))
        choices.append(
            Choice(
                problem.loads[m],
                options.table[row],
                pools[m],
                g,
                float(options.seconds[row]),
                int(options.packs[row]),
                float(options.memory_bytes[row]),
            )
        )
    return problem.plan(tuple((m,) for m in order), tuple(pools[m] for m in order), tuple(seconds), choices)
