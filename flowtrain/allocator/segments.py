"""Divides `pool.bytes` of each node among the processes on it that own a segment (pure, contract C10).

| who | owns a segment for | bytes |
|---|---|---|
| producer | its features, and the gradients that come back over them | the rest of its node, in equal parts |
| consumer that reaches every producer by shared memory | nothing: it reads in place | 0 |
| any other with first layers | copies of what it reads elsewhere | what its packs take, at most an equal part |
| its neighbours (`t`, `c`) on the same node | nothing: they see its copies | 0 |

Invariants: the segments of a node sum to at most `pool.bytes`; each is a whole number of pages.
"""

from __future__ import annotations

from collections import Counter

from flowtrain.allocator.place import Homes
from flowtrain.allocator.room import PAGE_BYTES, pack_room, packs_received, to_pages
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, first_on_node
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

COPYING = frozenset({"nixl", "ray"})
"""Transports that bring a copy to the reader, also where shared memory would reach."""

MAX_OWNERS_PER_NODE = 64
"""Segments of one node that an address can tell apart; a test holds it together with `flowtrain.pool.address`."""


def divide(
    config: Config, shape: ModelShape, homes: Homes, encoder: Layout, backbone: Layout
) -> dict[Role, tuple[int, ...]]:
    """Bytes of every rank's own segment; of producers that encode as one, with the layout `encoder`, the first has one,
    and of a pipeline those that read features, on each node the first of neighbours.

    Raises:
        PlanError: the transport that the config asks for does not reach from node to node, or too many owners.
    """
    leads = [encoder.leads(rank) for rank in range(len(homes[Role.PRODUCER]))]
    producers = [node for node, leading in zip(homes[Role.PRODUCER], leads, strict=True) if leading]
    consumers = homes[Role.CONSUMER]
    transport = config.pool.transport
    if transport == "shm" and len({*producers, *consumers}) > 1:
        raise PlanError(
            f"pool.transport is shm and the plan has processes on nodes {sorted({*producers, *consumers})}: shared "
            f"memory ends at the node; use auto, nixl or ray"
        )
    several = config.placement != "colocated"
    copies = [
        several
        and backbone.begins(rank)
        and first_on_node(backbone, consumers, rank) == rank
        and (transport in COPYING or set(producers) != {node})
        for rank, node in enumerate(consumers)
    ]
    owners = Counter(producers) + Counter(node for node, copying in zip(consumers, copies, strict=True) if copying)
    for node, num in owners.items():
        if num > MAX_OWNERS_PER_NODE:
            raise PlanError(
                f"node {node} has {num} pool segments and an address tells {MAX_OWNERS_PER_NODE} of a node apart: "
                f"spread the producers and consumers over more nodes"
            )
    most = to_pages(pack_room(config, shape).segment_bytes(packs_received(backbone)))
    shares = {node: config.pool.bytes // num // PAGE_BYTES * PAGE_BYTES for node, num in owners.items()}
    received = [min(shares[node], most) if copying else 0 for node, copying in zip(consumers, copies, strict=True)]
    taken: Counter[int] = Counter()
    for node, num_bytes in zip(consumers, received, strict=True):
        taken[node] += num_bytes
    sharing = Counter(producers)
    sent = [
        (config.pool.bytes - taken[node]) // sharing[node] // PAGE_BYTES * PAGE_BYTES if leading else 0
        for node, leading in zip(homes[Role.PRODUCER], leads, strict=True)
    ]
    return {Role.PRODUCER: tuple(sent), Role.CONSUMER: tuple(received)}
