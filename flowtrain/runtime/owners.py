"""Owner ids of a plan's segments: the node's number, and the segment's number on it (`flowtrain.pool.address`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from flowtrain.plan import Plan
from flowtrain.pool.address import MAX_LOCAL_OWNERS, make_owner
from flowtrain.types import Role


def owner_ids(plan: Plan) -> dict[tuple[Role, int], int]:
    """By role and rank, for the ranks that own a segment: producers first, then consumers that take copies."""
    taken: Counter[int] = Counter()
    owners = {}
    for rank in (*plan.producers.ranks, *plan.consumers.ranks):
        if rank.segment_bytes:
            owners[rank.role, rank.rank] = make_owner(rank.node, taken[rank.node])
            taken[rank.node] += 1
    return owners


def new_owner(node: int, taken: Collection[int]) -> int:
    """The first id on a node that nobody has; the plan leaves one for every producer that may come."""
    free = (owner for local in range(MAX_LOCAL_OWNERS) if (owner := make_owner(node, local)) not in taken)
    found = next(free, None)
    assert found is not None, f"all {MAX_LOCAL_OWNERS} owner ids of node {node} are taken"
    return found


def producer_owners(plan: Plan) -> tuple[int, ...]:
    """Owner ids by the data-parallel rank of producers."""
    owners = owner_ids(plan)
    return tuple(owners[Role.PRODUCER, rank.rank] for rank in plan.producers.leading)
