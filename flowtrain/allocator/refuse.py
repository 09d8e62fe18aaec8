"""When nothing fits: which constraint binds, and the nearest change that would do (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flowtrain.allocator.candidates import Scope, candidate_blocks
from flowtrain.allocator.hardware import MOST_DEVICES, num_devices
from flowtrain.allocator.options import Keep, MemoryModel, capacity_bytes, options
from flowtrain.allocator.search import tables
from flowtrain.allocator.solve import Problem, solve

MOST_NODES_FACTOR = 256
"""By which the number of nodes is multiplied at most, within `MOST_DEVICES`."""
GIGA = 1e9


def refusal(problem: Problem, memory: MemoryModel, scope: Scope) -> str:
    """On a problem of which `search` found no plan: what binds, with both numbers, and what to change."""
    return f"no plan fits: {_binding(problem, memory, scope)}; {_nearest(problem, memory, scope)}"


def _binding(problem: Problem, memory: MemoryModel, scope: Scope) -> str:
    there = " + ".join(f"{pool.num_nodes} x {pool.node.devices} {pool.node.name}" for pool in problem.cluster)
    fewest = []
    for load in problem.loads:
        longest = max(problem.job.sizes(load))
        if longest < load.longest_tokens and not load.own_pack:
            return f"packs of {longest} tokens cannot hold the longest sample of the {load.name}, {load.longest_tokens}"
        counts = []
        for pool in problem.cluster:
            found = options(load, pool, problem.job, memory, Keep(everything=True), scope)
            counts += [int(found.devices.min())] if len(found) else []
        if not counts:
            return _too_big(problem, memory, scope, load.name)
        fewest.append((load.name, min(counts)))
    if problem.placements == {"colocated"}:
        return _too_big_together(problem, memory, scope)
    needs = " and ".join(f"the {name} at least {count}" for name, count in fewest)
    return f"{needs} of the devices of {there}, each on devices of one kind"


def _too_big(problem: Problem, memory: MemoryModel, scope: Scope, name: str) -> str:
    """Memory binds, or the number of microbatches, for one module on every kind of node."""
    load = next(load for load in problem.loads if load.name == name)
    least: tuple[float, float] | None = None
    for pool in problem.cluster:
        room = capacity_bytes(pool.node, problem.job)
        sizes = problem.job.sizes(load)
        for block in candidate_blocks(load, pool, problem.job.step_samples, sizes, scope):
            used = float((memory(load, block, problem.job) / block.threads).min())
            if least is None or used - room < least[0] - least[1]:
                least = used, room
    if least is None:
        return f"no layout of the {name} divides it over these devices"
    if least[0] > least[1]:
        return (
            f"the {name} needs {least[0] / GIGA:.3g} GB of a device at least, "
            f"and {max(0.0, least[1]) / GIGA:.3g} GB of it may be taken"
        )
    return f"the {name} has fewer packs in a step than pipeline stages"


def _too_big_together(problem: Problem, memory: MemoryModel, scope: Scope) -> str:
    """Each module fits a device alone; side by side they do not, whatever the number of devices."""
    least: tuple[float, float] | None = None
    for pool in problem.cluster:
        room = capacity_bytes(pool.node, problem.job)
        used: dict[int, float] = {}
        for place, load in enumerate(problem.loads):
            found = options(load, pool, problem.job, memory, Keep(everything=True), scope)
            of_module: dict[int, float] = {}
            for devices, size in zip(found.devices.tolist(), found.memory_bytes.tolist(), strict=True):
                of_module[devices] = min(size, of_module.get(devices, size))
            used = {n: size + used[n] for n, size in of_module.items() if n in used} if place else of_module
        for size in used.values():
            if least is None or size - room < least[0] - least[1]:
                least = size, room
    names = ", ".join(load.name for load in problem.loads)
    if least is None:
        return f"{names} share their devices, and no number of devices suits all of them"
    return (
        f"{names} share their devices and need {least[0] / GIGA:.3g} GB of each together, and "
        f"{max(0.0, least[1]) / GIGA:.3g} GB of it may be taken"
    )


def _nearest(problem: Problem, memory: MemoryModel, scope: Scope) -> str:
    for what, changes in _CHANGES.items():
        for factor, other in changes(problem):
            here = replace(scope, coarse=True)
            if solve(other, tables(other, memory, here)) is not None:
                return what.format(factor=factor)
    return "choose a smaller model, shorter packs or devices with more memory"


def _fewer_tokens(problem: Problem) -> Iterator[tuple[str, Problem]]:
    longest = max(load.longest_tokens for load in problem.loads if load.name == "backbone")
    for size in sorted(problem.job.pack_tokens, reverse=True):
        for part in (2, 4):
            if size // part >= longest:
                job = replace(problem.job, pack_tokens=(size // part,))
                yield str(size // part), replace(problem, job=job)


def _more_nodes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    factor = 2
    while factor <= MOST_NODES_FACTOR:
        cluster = tuple(replace(pool, num_nodes=pool.num_nodes * factor) for pool in problem.cluster)
        if num_devices(cluster) > MOST_DEVICES:
            return
        yield (
            " + ".join(f"{pool.num_nodes} x {pool.node.devices} {pool.node.name}" for pool in cluster),
            replace(problem, cluster=cluster),
        )
        factor *= 2


def _more_memory(problem: Problem) -> Iterator[tuple[str, Problem]]:
    for factor in (1.25, 1.5, 2.0, 4.0):
        cluster = tuple(
            replace(pool, node=replace(pool.node, memory_bytes=factor * pool.node.memory_bytes))
            for pool in problem.cluster
        )
        most = max(pool.node.memory_bytes for pool in cluster)
        yield f"{most / GIGA:.0f}", replace(problem, cluster=cluster)


def _longer_packs(problem: Problem) -> Iterator[tuple[str, Problem]]:
    backbone = problem.loads[-1]
    longest = backbone.longest_tokens
    if longest > max(problem.job.pack_tokens) and not backbone.own_pack:
        yield str(longest), replace(problem, job=replace(problem.job, pack_tokens=(longest,)))


_CHANGES: dict[str, Callable[[Problem], Iterator[tuple[str, Problem]]]] = {
    "packs of {factor} tokens would do (packing.max_tokens)": _longer_packs,
    "packs of {factor} tokens would fit (packing.max_tokens)": _fewer_tokens,
    "it would fit on {factor}": _more_nodes,
    "it would fit on devices of {factor} GB": _more_memory,
}
"""Sentence → changes to try, the smallest first."""
