"""Why this plan: what binds it, which neighbours it beats, what would change it (pure).

    problem ─▶ plan ─┬─▶ neighbours   the best plan that differs in one thing, and what it loses
                     ├─▶ levers       what one more node, more memory or a faster network would gain
                     └─▶ sensitivity  other data, one node less

Levers and sensitivity of a large cluster come from coarse looks, in which only the plan's own cuts of the modules are
complete; each is compared with such a look at the problem itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.candidates import Scope
from flowtrain.allocator.hardware import NodePool
from flowtrain.allocator.options import MemoryModel, Options
from flowtrain.allocator.runnable import Space
from flowtrain.allocator.search import LARGE, NEIGHBOUR_BOUND, tables
from flowtrain.allocator.solve import Problem, Solution, solve

SLACK = 1e-6
"""Kept beside a bound, so that rounding decides nothing."""
NUM_NEIGHBOURS = 3
WORSE = 3.0
"""By which factor other data, or fewer nodes, may lower the rate before everything is looked at again."""
SIGNIFICANT_PERCENT = 0.5

Change = Callable[[Problem], Problem]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs in one thing, and how much of the rate it loses."""

    what: str
    rate: float
    loss_percent: float
    solution: Solution


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change of the problem does to the best rate; None: nothing fits any more."""

    what: str
    gain_percent: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    binding: str
    neighbours: tuple[Neighbour, ...]
    levers: tuple[Effect, ...]
    sensitivity: tuple[Effect, ...]


def explain(
    problem: Problem,
    memory: MemoryModel,
    found: Solution,
    scope: Scope,
    other_data: dict[str, Problem],
    beside: Sequence[Space] = (),
    others: Sequence[Solution] = (),
) -> Explanation:
    """`found` is the best plan of `problem` in `scope`.

    `other_data`: the same problem with other samples, by what is different. `beside`: spaces that were searched too,
    `others`: their best plans.
    """
    large = max(pool.devices for pool in problem.cluster) > LARGE
    cuts = frozenset((c.tp, c.cp, c.pp) for c in (choice.candidate for choice in found.choices))
    here = [Space(problem.placements, scope), *beside]
    if large:
        here = [replace(space, scope=replace(space.scope, coarse=True, fine=cuts)) for space in here]
    base = _rate(problem, memory, here)
    levers = tuple(_lever(what, change(problem), memory, here, base) for what, change in LEVERS.items())
    sensitivity = [_effect(what, other, memory, here, base) for what, other in other_data.items()]
    less = _one_node_less(problem)
    sensitivity.append(_effect("one node less", less, memory, here, base) if less else Effect("one node less", None))
    return Explanation(
        binding=_binding(problem, found, levers),
        neighbours=tuple(_neighbours(problem, memory, found, scope, others)),
        levers=levers,
        sensitivity=tuple(sensitivity),
    )


def _more_nodes(problem: Problem) -> Problem:
    return replace(problem, cluster=tuple(replace(p, num_nodes=p.num_nodes + 1) for p in problem.cluster))


def _nodes(**factors: float) -> Change:
    def change(problem: Problem) -> Problem:
        def faster(pool: NodePool) -> NodePool:
            figures = {name: getattr(pool.node, name) * factor for name, factor in factors.items()}
            return replace(pool, node=replace(pool.node, **figures))

        return replace(problem, cluster=tuple(map(faster, problem.cluster)))

    return change


LEVERS: dict[str, Change] = {
    "one more node": _more_nodes,
    "a quarter more device memory": _nodes(memory_bytes=1.25),
    "twice the network": _nodes(network_bandwidth=2.0),
    "twice the samples of a step": lambda problem: replace(
        problem, job=replace(problem.job, step_samples=2 * problem.job.step_samples)
    ),
}
"""What a user may change → the problem then."""


def _one_node_less(problem: Problem) -> Problem | None:
    """Without one node of the most numerous kind."""
    most = max(range(len(problem.cluster)), key=lambda n: problem.cluster[n].num_nodes)
    pools = list(problem.cluster)
    if pools[most].num_nodes > 1:
        pools[most] = replace(pools[most], num_nodes=pools[most].num_nodes - 1)
    elif len(pools) > 1:
        del pools[most]
    else:
        return None
    return replace(problem, cluster=tuple(pools))


def _rate(problem: Problem, memory: MemoryModel, here: Sequence[Space], at_least: float | None = None) -> float | None:
    """The best rate; None where nothing reaches `at_least`, which keeps the look short."""
    most_seconds = float("inf") if at_least is None else (1.0 + SLACK) / at_least
    rates = []
    for space in here:
        asked = space.of(problem)
        found = solve(asked, tables(asked, memory, space.scope, most_seconds))
        rates += [] if found is None else [found.rate]
    return max(rates, default=None)


def _lever(what: str, problem: Problem, memory: MemoryModel, here: Sequence[Space], base: float | None) -> Effect:
    """More of something never lowers the best rate, so only what reaches it is looked at."""
    if base is None:
        return Effect(what, None)
    rate = _rate(problem, memory, here, at_least=base)
    return Effect(what, 100.0 * max(0.0, (rate or base) / base - 1.0))


def _effect(what: str, problem: Problem, memory: MemoryModel, here: Sequence[Space], base: float | None) -> Effect:
    if base is None:
        return Effect(what, None)
    rate = _rate(problem, memory, here, at_least=base / WORSE) or _rate(problem, memory, here)
    return Effect(what, None if rate is None else 100.0 * (rate / base - 1.0))


def _binding(problem: Problem, found: Solution, levers: tuple[Effect, ...]) -> str:
    """The slowest group, and the lever that moves the rate most."""
    slowed = [s * (1.0 + (problem.job.headroom if g else 0.0)) for g, s in enumerate(found.group_seconds)]
    slowest = max(range(len(slowed)), key=lambda g: slowed[g])
    *others, last = [choice.load.name for choice in found.choices if choice.group == slowest]
    who = f"the {', '.join(others)} and {last} set the rate" if others else f"the {last} sets the rate"
    gains = [effect for effect in levers if effect.gain_percent is not None]
    best = max(gains, key=lambda effect: effect.gain_percent or 0.0, default=None)
    if best is None or (best.gain_percent or 0.0) < SIGNIFICANT_PERCENT:
        return f"{who}; more nodes, memory, network or samples a step would not help"
    return f"{who}; {best.what} helps most ({best.gain_percent:+.1f} %)"


def _neighbours(
    problem: Problem, memory: MemoryModel, found: Solution, scope: Scope, others: Sequence[Solution]
) -> Iterator[Neighbour]:
    """The best few plans that differ in one thing."""
    table = found.among or tables(problem, memory, scope, NEIGHBOUR_BOUND / found.rate)
    seen = {_layouts(found)}
    candidates = []
    placement = problem.placement(found.partition)
    elsewhere = [(f"{problem.placement(other.partition)} instead of {placement}", other) for other in others]
    near = ((what, solve(other, rows)) for what, other, rows in _variants(problem, found, table))
    for what, solution in (*elsewhere, *near):
        if solution is not None and _layouts(solution) not in seen:
            seen.add(_layouts(solution))
            loss = 100.0 * (1.0 - solution.rate / found.rate)
            candidates.append(Neighbour(what, solution.rate, loss, solution))
    yield from sorted(candidates, key=lambda neighbour: -neighbour.rate)[:NUM_NEIGHBOURS]


def _layouts(found: Solution) -> tuple[object, ...]:
    return (found.partition, found.pools, tuple(choice.candidate for choice in found.choices))


def _variants(
    problem: Problem, found: Solution, table: Mapping[tuple[int, int], Options]
) -> Iterator[tuple[str, Problem, Mapping[tuple[int, int], Options]]]:
    placement = problem.placement(found.partition)
    for other in sorted(problem.placements - {placement}):
        yield f"{other} instead of {placement}", replace(problem, placements=frozenset({other})), table
    same = replace(problem, placements=frozenset({placement}))
    for choice in found.choices:
        m, c = problem.loads.index(choice.load), choice.candidate
        name, cut = choice.load.name, c.tp * c.cp * c.pp
        there = table[m, choice.pool]
        others = {
            f"{name} on fewer devices": there.devices < c.devices,
            f"{name} on more devices": there.devices > c.devices,
            f"{name} cut otherwise than t{c.tp}c{c.cp}p{c.pp}": there.table.tp * there.table.cp * there.table.pp != cut,
        }
        for what, rows in others.items():
            yield what, same, {**table, (m, choice.pool): there.take(rows)}
