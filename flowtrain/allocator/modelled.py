"""What each open placement could do at best on devices of one kind, by the throughput model (pure).

    config, devices ─▶ problem ─▶ spaces that launch runs ─▶ policy ─▶ within the pool, on the nodes ─▶ picks

Where the best plan of a space asks for more of the pool than there is (C6), the best one of each number of packs that
run together is looked for, with as many producers as the pool then holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.bound import bound_note, bound_scope, side_of
from flowtrain.allocator.candidates import Scope, powers_of_two
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import Cluster
from flowtrain.allocator.place import Need, NodeRoom, place
from flowtrain.allocator.policies import POLICIES
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.refuse import refusal
from flowtrain.allocator.room import PackRoom, pack_room, packs_together
from flowtrain.allocator.runnable import Space, runnable
from flowtrain.allocator.solve import Problem, Solution
from flowtrain.allocator.stats import DataStats
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


ONE = Layout()


@dataclass(frozen=True, slots=True)
class PickedSide:
    """`threads` None: what the number of processes leaves."""

    layout: Layout = ONE
    threads: int | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Pick:
    """`rate` in samples/s."""

    placement: str
    producers: PickedSide
    consumers: PickedSide
    rate: float
    solution: Solution | None = None


def modelled(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    stats: DataStats | None,
    nodes: Sequence[NodeRoom] | None,
) -> list[Pick]:
    """The best of each placement; none where the pool holds nothing, or a CPU's memory, which is counted by core.

    Raises:
        PlanError: on GPUs, nothing fits their memory; the sentence has both numbers.
    """
    problem = question_of(config, shape, stats, cluster).problem()
    on_cpu = cluster[0].node.on_cpu
    most = MOST_PER_SIDE * cluster[0].num_nodes if on_cpu else cluster[0].devices
    scope = _at_most(bound_scope(config), most, most)
    spaces = runnable(problem, scope, shape, config.allocation.replan != "off", copies=on_cpu)
    best: dict[str, Pick] = {}
    fits = False
    for space in spaces:
        (placement,) = space.placements

        def search(within: Scope, space: Space = space) -> Solution | None:
            return POLICIES[config.policy](space.of(problem), device_bytes, within)

        free = search(space.scope)
        fits = fits or free is not None
        found = _within_pool(config, shape, space.scope, most, search, free) if free is not None else []
        for plan in sorted(found, key=lambda plan: -plan.rate):
            pick = _pick(placement, plan, on_cpu)
            if nodes is not None and on_cpu and not _has_room(config, pick, nodes):
                continue
            if placement not in best or pick.rate > best[placement].rate:
                best[placement] = pick
            break
    if not fits and not on_cpu:
        assumed = [] if stats is not None else ["sizes of rows are assumed: `flowtrain data scan` writes them"]
        raise PlanError("; ".join([_refusal(problem, spaces), *bound_note(config), *assumed]))
    return list(best.values())


def _refusal(problem: Problem, spaces: Sequence[Space]) -> str:
    """Of the space with most layouts, the first."""
    if not spaces:
        return "no placement runs these layouts: colocated sides are as many whole copies each"
    return refusal(spaces[0].of(problem), device_bytes, spaces[0].scope)


def _at_most(scope: Scope, producers: int, packs: int) -> Scope:
    return replace(
        scope, producers=replace(scope.producers, most=producers), consumers=replace(scope.consumers, most=packs)
    )


def _within_pool(
    config: Config,
    shape: ModelShape,
    scope: Scope,
    most: int,
    search: Callable[[Scope], Solution | None],
    free: Solution,
) -> list[Solution]:
    """`free` where the pool holds it, else the best plan for each number of packs that run together."""
    room = pack_room(config, shape)
    if holds(config.pool.bytes, room, free):
        return [free]
    found = []
    for packs in choices(most + 1):
        producers = min(most, config.pool.bytes // room.segment_bytes(packs))
        if producers < 1:
            break
        plan = search(_at_most(scope, producers, packs))
        if plan is not None and holds(config.pool.bytes, room, plan):
            found.append(plan)
    return found


def holds(pool_bytes: int, room: PackRoom, plan: Solution) -> bool:
    """Whether each producer's segment holds the packs that run together."""
    encoder, backbone = plan.choices[0].candidate.layout, plan.choices[-1].candidate.layout
    return room.holds(packs_together(backbone), pool_bytes // encoder.dp_degree)


def _pick(placement: str, plan: Solution, on_cpu: bool) -> Pick:
    """Colocated, the threads of a process follow from their number."""
    apart = placement != "colocated"
    first, last = (
        PickedSide(c.layout, c.threads if on_cpu and apart else None, bool(c.recompute))
        for c in (plan.choices[0].candidate, plan.choices[-1].candidate)
    )
    return Pick(placement, first, last, plan.rate, plan)


def _has_room(config: Config, pick: Pick, nodes: Sequence[NodeRoom]) -> bool:
    """Whether whole processes fit the nodes: the search counts cores of all of them."""
    counted = config.cluster.oversubscribe is not True
    needs = [
        Need(role, side.layout.world_size, (side.threads or 1) if counted else 0, 0, side_of(config, role).node)
        for role, side in ((Role.CONSUMER, pick.consumers), (Role.PRODUCER, pick.producers))
    ]
    try:
        place(needs, nodes)
    except PlanError:
        return False
    return True


def choices(total: int) -> list[int]:
    """Numbers below `total` that are tried: all up to `ALL_UP_TO`; then powers of two, and what these leave."""
    some = [*range(1, min(ALL_UP_TO, total - 1) + 1), *powers_of_two(total - 1)]
    return sorted({*some, *(total - number for number in some)})
