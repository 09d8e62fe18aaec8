"""Room for producers that may be added while the run goes on (`allocation.replan: auto`, pure).

The pool of each node is divided for the most producers there may be on it, so that a segment, and with it the bound on
packs, is the same whatever the number is at the time: the number of producers never enters packs (C1). Producer k comes
to the node of producer k mod N of the plan's N, with a segment like that one's.

Invariant: whatever the number is, the segments of a node sum to at most `pool.bytes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flowtrain.allocator.room import PAGE_BYTES
from flowtrain.allocator.segments import MAX_OWNERS_PER_NODE
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, Plan, RankPlan


def most_producers(config: Config, plan: Plan) -> int:
    """The largest number that a change may come to; that of the plan where there is none."""
    number = len(plan.producers.ranks)
    allocation = config.allocation
    if allocation.replan != "auto" or plan.placement == "colocated":
        return number
    return max(number, allocation.max_producers or 2 * number)


def with_spare(config: Config, plan: Plan) -> Plan:
    """The plan with segments that leave the others theirs.

    Raises:
        PlanError: a node would have more segments than addresses tell apart.
    """
    number, most = len(plan.producers.ranks), most_producers(config, plan)
    if most == number:
        return plan
    now = Counter(rank.node for rank in plan.producers.ranks)
    then = Counter(producer_rank(plan, rank).node for rank in range(most))
    owners = then + Counter(rank.node for rank in plan.consumers.ranks if rank.segment_bytes)
    node, num = owners.most_common(1)[0]
    if num > MAX_OWNERS_PER_NODE:
        raise PlanError(
            f"with {most} producers node {node} would have {num} pool segments and an address tells "
            f"{MAX_OWNERS_PER_NODE} of a node apart: lower allocation.max_producers"
        )
    ranks = tuple(
        replace(rank, segment_bytes=rank.segment_bytes * now[rank.node] // then[rank.node] // PAGE_BYTES * PAGE_BYTES)
        for rank in plan.producers.ranks
    )
    pool_bytes = sum(rank.segment_bytes for rank in (*ranks, *plan.consumers.ranks))
    return replace(plan, producers=replace(plan.producers, ranks=ranks), pool_bytes=pool_bytes)


def spare_ranks(config: Config, plan: Plan) -> tuple[RankPlan, ...]:
    """Producers that may be added."""
    return tuple(producer_rank(plan, rank) for rank in range(len(plan.producers.ranks), most_producers(config, plan)))


def producer_rank(plan: Plan, rank: int) -> RankPlan:
    """The producer of this number, like those of the plan."""
    ranks = plan.producers.ranks
    return replace(ranks[rank % len(ranks)], rank=rank)


def with_producers(plan: Plan, number: int) -> Plan:
    """The plan with another number of producers of the same kind."""
    ranks = tuple(producer_rank(plan, rank) for rank in range(number))
    return replace(plan, producers=replace(plan.producers, layout=Layout(dp_replicate=number), ranks=ranks))
