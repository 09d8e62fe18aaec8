"""How many vision bytes a pack may hold, so that a bounded pool can never dead-lock (contract C6).

The packs of one slot run together, one for each consumer rank, and of a pipeline those of `Layout.packs_held` slots: R
packs in all, whose embeddings may all lie in one segment.
A ring that is given blocks of S bytes in all, none above B, holds them wherever its head stands when S + B ≤ capacity.
With S = R · cap this gives the largest cap. A segment of more than 64 GiB has F fences, none crossed by a block, and
each may leave a gap like the one at the end:

    R · cap + F · B ≤ smallest segment,   B = block of a row of `max_row_tokens`, all of them vision

A consumer that cannot read in place copies a pack into a ring of its own, which must hold the packs in flight to it, H:

    H · cap + B ≤ smallest receive segment

Where a row's tokens do not bound its features (`ModelShape.bounds_features`), a block may be as large as a whole pack
may be: B = cap.
"""

from __future__ import annotations

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, Plan, RankPlan
from flowtrain.shapes import ALIGNMENT, ModelShape, payload_bytes

BLOCK_HEADER_BYTES = 64
"""What the pool adds to each payload; `flowtrain.pool.block` has the same figure, and a test holds the two together."""

PACKS_HELD = 2
"""Packs whose copies a consumer outside of a pipeline may hold: those in flight to it (`DEPTH` of
`flowtrain.runtime.flow_producers`; a test holds the two together)."""


def packs_received(backbone: Layout) -> int:
    """Packs whose copies a consumer may hold."""
    return PACKS_HELD + backbone.packs_held - 1


def largest_block_bytes(config: Config, shape: ModelShape) -> int:
    """Block of the longest row allowed, if it were all vision tokens."""
    tokens = config.max_row_tokens
    patches = tokens * shape.projector.patches_per_token
    return BLOCK_HEADER_BYTES + payload_bytes(shape.features(config.cut), config.model.dtype, tokens, patches)


def pool_room(config: Config, shape: ModelShape, plan: Plan) -> int:
    """Most vision bytes, block headers included, of one pack.

    Raises:
        PlanError: not even a pack of one full row for each rank fits.
    """
    layout = plan.consumers.layout
    num_packs = layout.dp_degree * layout.packs_held
    largest = largest_block_bytes(config, shape)
    sending = min(plan.producers.leading, key=lambda rank: rank.segment_bytes)
    needed = (num_packs + gaps(sending.segment_bytes)) * largest
    if needed > sending.segment_bytes:
        raise PlanError(
            f"pool.bytes gives producer {sending.rank} on node {sending.node} a segment of {sending.segment_bytes} "
            f"bytes, and {num_packs} packs that run together, with one full row of {config.max_row_tokens} tokens "
            f"each, need {needed} bytes: {_remedy(plan, sending, needed)}"
        )
    bounded = shape.bounds_features(config.cut)
    room = _share(sending.segment_bytes, num_packs, largest if bounded else None)
    receiving = [rank for rank in plan.consumers.ranks if rank.segment_bytes]
    if receiving:
        smallest = min(receiving, key=lambda rank: rank.segment_bytes)
        held = packs_received(layout)
        needed = (held + gaps(smallest.segment_bytes)) * largest
        if needed > smallest.segment_bytes:
            raise PlanError(
                f"pool.bytes gives consumer {smallest.rank} on node {smallest.node} a segment of "
                f"{smallest.segment_bytes} bytes for what it reads from other nodes, and {held} packs with one "
                f"full row of {config.max_row_tokens} tokens each need {needed} bytes: "
                f"{_remedy(plan, smallest, needed)}"
            )
        room = min(room, _share(smallest.segment_bytes, held, largest if bounded else None))
    return room // ALIGNMENT * ALIGNMENT


def _share(segment_bytes: int, packs: int, largest: int | None) -> int:
    """The largest cap of the page above; `largest` is None where a block may be as large as the cap."""
    if largest is None:
        return segment_bytes // (packs + gaps(segment_bytes))
    return (segment_bytes - gaps(segment_bytes) * largest) // packs


def _remedy(plan: Plan, tight: RankPlan, needed: int) -> str:
    receiving = (rank for rank in plan.consumers.ranks if rank.segment_bytes)
    owners = (*plan.producers.leading, *plan.spare, *receiving)
    sharing = sum(1 for rank in owners if rank.node == tight.node)
    return f"set pool.bytes to {sharing * to_pages(needed)} or more, or lower data.max_seq_len"


def gaps(segment_bytes: int) -> int:
    """Places of a segment that a block may not lie across, its end included."""
    return max(1, -(-segment_bytes // FENCE_BYTES))


def to_pages(size: int) -> int:
    """Rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


FENCE_BYTES = 64 * 2**30
"""No block lies across a multiple of it; `flowtrain.pool.arena` has the same figure, and a test holds them together."""

PAGE_BYTES = 4096
"""Segments are whole pages."""
