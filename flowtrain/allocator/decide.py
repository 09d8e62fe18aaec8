"""Decides what a config leaves open about its processes, so that the plan can be built from keys alone (pure).

    config + shape + machine (+ sizes of rows, + profile) ──decide──▶ config with placement, layouts and threads set

| key | bound when | else |
|---|---|---|
| `allocation.placement` | it names one, or the mode does | `auto`: the one with the higher predicted rate |
| `num`, `layout`, `threads` of a side | set | what the policy gives, among what launch runs: data-parallel copies |

With a profile the rates are predictions from what was measured on this machine (`predict`); without one, those of the
throughput model. The result is a config in which nothing is open, so that deciding again changes nothing. On a
cluster it is the driver that decides, once it has joined and knows the nodes. What cannot be searched (a cluster that
is not joined yet, one GPU for two sides, GPUs that are unknown or of several kinds) keeps one process a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowtrain.allocator.bound import SIDES, bound_side, given_layout, given_threads, has_open_sizes, side_of
from flowtrain.allocator.candidates import Scope, powers_of_two
from flowtrain.allocator.devices import devices_of
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.load import Candidate, CandidateTable
from flowtrain.allocator.options import capacity_bytes
from flowtrain.allocator.place import Need, NodeRoom, place
from flowtrain.allocator.policies import POLICIES
from flowtrain.allocator.predict import Predictor, Setup, predict
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.profile import Profile
from flowtrain.allocator.room import largest_block_bytes
from flowtrain.allocator.solve import Problem
from flowtrain.allocator.stats import DataStats, assumed_stats
from flowtrain.allocator.throughput import rates
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

MOST_PER_SIDE = 4
"""Processes of a side that are chosen on the cores of a node: each takes memory and seconds to start that no rate
shows."""
ALL_UP_TO = 8
"""Threads of a process, or processes, up to which every number is tried: pairs of all numbers of a large machine are
tens of thousands, and neighbours among many differ by little."""
WORTH = 1.02
"""A profile's prediction must be higher by this factor to choose more processes."""


@dataclass(frozen=True, slots=True)
class Decided:
    """`rate` in samples/s as predicted, None where nothing was open; `notes` say what was compared."""

    config: Config
    rate: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pick:
    placement: str
    producers: int
    producer_threads: int | None
    consumers: int
    consumer_threads: int | None
    rate: float


def decide(
    config: Config,
    shape: ModelShape,
    inventory: Inventory,
    stats: DataStats | None = None,
    profile: Profile | None = None,
    nodes: Sequence[NodeRoom] | None = None,
) -> Decided:
    """See the page above; where nothing can be searched, or nothing fits, the placement is the mode's.

    `nodes`: of a cluster that was joined, the driver's first.
    """
    auto = config.allocation.placement == "auto"
    if not auto and (config.placement == "colocated" or not has_open_sizes(config)):
        return Decided(config)
    picks = list(_picks(config, shape, inventory, stats, profile, nodes))
    if not picks:
        return Decided(_with_placement(config, config.placement))
    best = max(picks, key=lambda pick: pick.rate)
    return Decided(_with(config, best), best.rate, tuple(_told(pick) for pick in picks) if len(picks) > 1 else ())


def _told(pick: _Pick) -> str:
    ranks = f", {pick.consumers} ranks" if pick.placement == "colocated" and pick.consumers > 1 else ""
    return f"{pick.placement}{ranks}: {pick.rate:.4g} samples/s predicted"


def _picks(
    config: Config,
    shape: ModelShape,
    inventory: Inventory,
    stats: DataStats | None,
    profile: Profile | None,
    nodes: Sequence[NodeRoom] | None,
) -> Iterator[_Pick]:
    """What each placement that is open could do at best."""
    auto = config.allocation.placement == "auto"
    alone = all((given_layout(config, role) or Layout()) == Layout() for role in SIDES)
    if profile is not None:
        if (auto and alone) or config.placement == "colocated":
            yield from _colocated_measured(config, shape, inventory, profile)
        if auto or config.placement != "colocated":
            yield from _measured(config, shape, inventory, profile)
        return
    cluster = devices_of(config, inventory, nodes)
    if cluster is None:
        return
    found = stats or assumed_stats(config.packing.max_tokens)
    problem = question_of(config, shape, found, cluster).problem()
    if auto and alone:
        yield from _colocated(config, inventory, problem)
    if auto or config.placement != "colocated":
        yield from _searched(config, shape, problem, nodes)


def _searched(config: Config, shape: ModelShape, problem: Problem, nodes: Sequence[NodeRoom] | None) -> Iterator[_Pick]:
    """The policy's choice among copies; where the pool is small, the best of those that it can hold (C6)."""
    on_cpu = problem.cluster[0].node.on_cpu
    most = MOST_PER_SIDE * problem.cluster[0].num_nodes if on_cpu else problem.cluster[0].devices
    apart = replace(problem, placements=frozenset({"disaggregated"}))
    best: _Pick | None = None
    for consumers in _choices(most + 1):
        producers = config.pool.bytes // ((consumers + 1) * largest_block_bytes(config, shape))
        if producers < 1:
            break
        scope = Scope(
            replicas_only=True,
            producers=bound_side(config, Role.PRODUCER, min(most, producers)),
            consumers=bound_side(config, Role.CONSUMER, consumers),
        )
        found = POLICIES[config.policy](apart, device_bytes, scope)
        if found is not None and (best is None or found.rate > best.rate):
            encoder, backbone = found.choices[0].candidate, found.choices[-1].candidate
            pick = _Pick(
                "disaggregated",
                encoder.replicas,
                encoder.threads if on_cpu else None,
                backbone.replicas,
                backbone.threads if on_cpu else None,
                found.rate,
            )
            if nodes is None or not on_cpu or _has_room(config, pick, nodes):
                best = pick
    if best is not None:
        yield best


def _has_room(config: Config, pick: _Pick, nodes: Sequence[NodeRoom]) -> bool:
    """Whether whole processes fit the nodes: the search counts cores of all of them."""
    sides = (
        (Role.CONSUMER, pick.consumers, pick.consumer_threads),
        (Role.PRODUCER, pick.producers, pick.producer_threads),
    )
    counted = config.cluster.oversubscribe is not True
    try:
        place([Need(r, num, (t or 1) if counted else 0, 0, side_of(config, r).node) for r, num, t in sides], nodes)
    except PlanError:
        return False
    return True


def _colocated(config: Config, inventory: Inventory, problem: Problem) -> Iterator[_Pick]:
    """One process with all cores, or one GPU."""
    pool, job = problem.cluster[0], problem.job
    threads = _colocated_threads(config, inventory) if pool.node.on_cpu else 1
    seconds = used = 0.0
    for load in problem.loads:
        candidate = Candidate(pack_tokens=max(job.sizes(load)), threads=threads)
        seconds += 1.0 / float(rates(load, candidate, pool.node, job).shared_rate[0])
        used += float(device_bytes(load, CandidateTable.of([candidate]), job)[0])
    if used / threads <= capacity_bytes(pool.node, job):
        yield _Pick("colocated", 1, None, 1, None, 1.0 / seconds)


def _measured(config: Config, shape: ModelShape, inventory: Inventory, profile: Profile) -> Iterator[_Pick]:
    """The best setup by the profile; more processes only where they are worth it, and a GPU for each that had one."""
    best: _Pick | None = None
    predictor = Predictor(profile)
    on_gpu = {stage.role for stage in profile.stages if stage.device.startswith("cuda") and not stage.colocated}
    for producers, p_threads, consumers, c_threads in _setups(config, inventory):
        if config.pool.bytes // producers < (consumers + 1) * largest_block_bytes(config, shape):
            continue
        if producers * (Role.PRODUCER in on_gpu) + consumers * (Role.CONSUMER in on_gpu) > inventory.gpus:
            continue
        setup = Setup(False, producers, p_threads, consumers, c_threads, inventory.cpus, on_cpu=not on_gpu)
        rate = predictor.predict(setup).samples_per_second
        more = best is not None and producers + consumers > best.producers + best.consumers
        if best is None or rate > best.rate * (WORTH if more else 1.0):
            best = _Pick("disaggregated", producers, p_threads, consumers, c_threads, rate)
    if best is not None:
        yield best


def _colocated_measured(config: Config, shape: ModelShape, inventory: Inventory, profile: Profile) -> Iterator[_Pick]:
    """One process, then more where nothing is said of their number, the cores divided among them."""
    threads = _colocated_threads(config, inventory)
    on_cpu = all(stage.device == "cpu" for stage in profile.stages)
    is_open = on_cpu and all(
        given_layout(config, role) is None and side_of(config, role).threads is None for role in SIDES
    )
    for number in range(1, min(MOST_PER_SIDE, inventory.cpus) + 1 if is_open else 2):
        if number > 1 and config.pool.bytes // number < 2 * largest_block_bytes(config, shape):
            break
        each = threads if number == 1 else inventory.cpus // number
        setup = Setup(True, number, each, number, each, inventory.cpus, on_cpu)
        rate = predict(profile, setup).samples_per_second
        yield _Pick("colocated", number, None, number, None, rate)


def _setups(config: Config, inventory: Inventory) -> Iterator[tuple[int, int, int, int]]:
    """Numbers and threads of both sides within the cores, fewest processes first; keys that are set bind."""
    cores = max(2, inventory.cpus)
    numbers = [
        [given.world_size] if (given := given_layout(config, role)) else list(range(1, MOST_PER_SIDE + 1))
        for role in SIDES
    ]
    threads = [[side.threads] if side.threads else _choices(cores) for side in (config.producers, config.consumers)]
    every = (
        (producers, p_threads, consumers, c_threads)
        for producers in numbers[0]
        for consumers in numbers[1]
        for p_threads in threads[0]
        for c_threads in threads[1]
        if producers * p_threads + consumers * c_threads <= cores
    )
    yield from sorted(every, key=lambda setup: (setup[0] + setup[2], setup))


def _choices(total: int) -> list[int]:
    """Numbers below `total` that are tried: all up to `ALL_UP_TO`; then powers of two, and what these leave."""
    some = [*range(1, min(ALL_UP_TO, total - 1) + 1), *powers_of_two(total - 1)]
    return sorted({*some, *(total - number for number in some)})


def _colocated_threads(config: Config, inventory: Inventory) -> int:
    return given_threads(config, Role.CONSUMER, "colocated") or max(1, inventory.cpus)


def _with_placement(config: Config, placement: str) -> Config:
    if config.allocation.placement != "auto":
        return config
    return config.model_copy(update={"allocation": config.allocation.model_copy(update={"placement": placement})})


def _with(config: Config, pick: _Pick) -> Config:
    config = _with_placement(config, pick.placement)
    if pick.placement == "colocated" and pick.consumers == 1:
        return config
    sides: Sequence[tuple[Role, int, int | None]] = (
        (Role.PRODUCER, pick.producers, pick.producer_threads),
        (Role.CONSUMER, pick.consumers, pick.consumer_threads),
    )
    update: dict[str, Any] = {}
    for role, number, threads in sides:
        side = side_of(config, role)
        changed: dict[str, Any] = {} if given_layout(config, role) else {"num": number}
        if side.threads is None and threads is not None:
            changed["threads"] = threads
        update[f"{role}s"] = side.model_copy(update=changed)
    return config.model_copy(update=update)
