"""Room for producers that may be added while the run goes on (`allocation.replan: auto`, pure).

The pool of each node is divided for the most producers there may be on it, so that a segment, and with it the bound on
packs, is the same whatever the number is at the time: the number of producers never enters packs (C1).

A new producer comes to a node that has one, as consumers reach the segments of those nodes only; to the one with the
fewest of those that have the cores and GPUs for it. The plan names all of them, in the order in which they come. How
many there may be, `allocation.max_producers` says; where it is not set, twice as many, or as many as have room.

Invariants: whatever the number is, the segments of a node sum to at most `pool.bytes`; no node is given more than its
room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flowtrain.allocator.place import NodeRoom, describe_rooms
from flowtrain.allocator.room import PAGE_BYTES
from flowtrain.allocator.segments import MAX_OWNERS_PER_NODE
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, Plan, RankPlan


def with_spare(config: Config, plan: Plan, nodes: Sequence[NodeRoom] | None = None) -> Plan:
    """The plan with the producers that may come, and segments that leave them theirs; `nodes`: what each node has, used
    or not, None where nobody has asked.

    Raises:
        PlanError: fewer have room than the config wants, or a node would have more segments than addresses tell apart.
    """
    allocation, number = config.allocation, len(plan.producers.ranks)
    if allocation.replan != "auto" or plan.placement == "colocated":
        return plan
    spare = _homes(config, plan, (allocation.max_producers or 2 * number) - number, nodes)
    now = Counter(rank.node for rank in plan.producers.ranks)
    then = now + Counter(spare)
    owners = then + Counter(rank.node for rank in plan.consumers.ranks if rank.segment_bytes)
    node, num = owners.most_common(1)[0]
    if num > MAX_OWNERS_PER_NODE:
        raise PlanError(
            f"with {number + len(spare)} producers node {node} would have {num} pool segments and an address tells "
            f"{MAX_OWNERS_PER_NODE} of a node apart: lower allocation.max_producers"
        )
    ranks = tuple(
        replace(rank, segment_bytes=rank.segment_bytes * now[rank.node] // then[rank.node] // PAGE_BYTES * PAGE_BYTES)
        for rank in plan.producers.ranks
    )
    pool_bytes = sum(rank.segment_bytes for rank in (*ranks, *plan.consumers.ranks))
    likes = {rank.node: rank for rank in reversed(ranks)}
    coming = tuple(replace(likes[node], rank=rank) for rank, node in enumerate(spare, start=number))
    return replace(plan, producers=replace(plan.producers, ranks=ranks), pool_bytes=pool_bytes, spare=coming)


def with_producers(plan: Plan, number: int) -> Plan:
    """The plan with another number of producers, as far as it names them; the others may come."""
    named = (*plan.producers.ranks, *plan.spare)
    ranks = named[:number]
    producers = replace(plan.producers, layout=Layout(dp_replicate=len(ranks)), ranks=ranks)
    return replace(plan, producers=producers, spare=named[number:])


def _homes(config: Config, plan: Plan, wanted: int, nodes: Sequence[NodeRoom] | None) -> list[int]:
    """The node of each producer that may come."""
    held = Counter(rank.node for rank in plan.producers.ranks)
    cpus: Counter[int] = Counter()
    gpus: Counter[int] = Counter()
    for rank in (*plan.producers.ranks, *plan.consumers.ranks):
        cpus[rank.node] += _cores(config, rank)
        gpus[rank.node] += rank.on_gpu
    first = plan.producers.ranks[0]
    found: list[int] = []
    while len(found) < wanted:
        open_nodes = [
            node
            for node in held
            if nodes is None
            or (
                cpus[node] + _cores(config, first) <= nodes[node].cpus and gpus[node] + first.on_gpu <= nodes[node].gpus
            )
        ]
        if not open_nodes:
            break
        node = min(open_nodes, key=lambda node: held[node])
        held[node] += 1
        cpus[node] += _cores(config, first)
        gpus[node] += first.on_gpu
        found.append(node)
    if nodes is not None and config.allocation.max_producers is not None and len(found) < wanted:
        raise PlanError(
            f"allocation.max_producers is {config.allocation.max_producers} and the nodes of the producers have room "
            f"for {len(plan.producers.ranks) + len(found)}; available per node: {describe_rooms(nodes)}: lower it"
        )
    return found


def _cores(config: Config, rank: RankPlan) -> int:
    """Cores that a process takes of its node: none where they may be oversubscribed."""
    return 0 if config.cluster.oversubscribe else rank.threads
