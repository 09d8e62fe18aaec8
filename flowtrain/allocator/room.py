"""How many vision bytes a pack may hold, so that a bounded pool can never dead-lock (contract C6).

The packs of one slot run together, one for each of R consumer ranks, and their embeddings may all lie in one segment.
A ring that is given blocks of S bytes in all, none above B, holds them wherever its head stands when S + B ≤ capacity.
With S = R · cap this gives the largest cap:

    R · cap + B ≤ smallest segment,   B = block of a row of `max_row_tokens`, all of them vision
"""

from __future__ import annotations

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import Plan
from flowtrain.shapes import ALIGNMENT, ModelShape, payload_bytes

BLOCK_HEADER_BYTES = 64
"""What the pool adds to each payload; `flowtrain.pool.block` has the same figure, and a test holds the two together."""


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
    segment_bytes = min(rank.segment_bytes for rank in plan.producers.ranks)
    num_consumers = len(plan.consumers.ranks)
    largest = largest_block_bytes(config, shape)
    needed = (num_consumers + 1) * largest
    if needed > segment_bytes:
        num_producers = len(plan.producers.ranks)
        raise PlanError(
            f"pool.bytes gives each of {num_producers} producers a segment of {segment_bytes} bytes and a slot of "
            f"{num_consumers} packs with one full row of {config.max_row_tokens} tokens each needs {needed} bytes: "
            f"set pool.bytes to {num_producers * _pages(needed)} or more, or lower data.max_seq_len"
        )
    return (segment_bytes - largest) // num_consumers // ALIGNMENT * ALIGNMENT


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


PAGE_BYTES = 4096
"""Segments are whole pages."""
