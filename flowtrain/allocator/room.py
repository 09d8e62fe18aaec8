"""How many vision bytes a pack may hold, and which segments hold the packs that run together (pure, contract C6).

    cap   a full pack, all of it vision: `packing.max_tokens` tokens, or `packing.max_patches` patches if that is less
    B     a row as long as one may be, all of it vision

Both follow from the config alone. So a pool divided among more producers changes no pack: it holds them, or the plan is
refused (contract C1).

The packs of one slot run together, one for each consumer rank, and of a pipeline those of `Layout.packs_held` slots: R
packs in all, whose embeddings may all lie in one segment.
A ring that is given blocks of S bytes in all, none above B, holds them wherever its head stands when S + B ≤ capacity.
A segment of more than 64 GiB has F fences, none crossed by a block, and each may leave a gap like the one at the end:

    R · cap + F · B ≤ every producer's segment

A consumer that cannot read in place copies a pack into a ring of its own, which must hold the packs in flight to it, H:

    H · cap + F · B ≤ its segment

The cap takes nothing from a pack within its token limit, headers included, where a token has at least 128 bytes in each
feature: every sample has a token that is trained, and its bytes are more than those of the sample's header and padding.
Where a row's tokens do not bound its features (`ModelShape.bounds_features`) the cap is twice a full pack, unless
`packing.max_patches` says how many there are; a block may then be as large: B = cap.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from flowtrain.config.schema import Config, PackingConfig
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, Plan, RankPlan
from flowtrain.shapes import ModelShape, payload_bytes
from flowtrain.types import Cut

BLOCK_HEADER_BYTES = 64
"""What the pool adds to each payload; `flowtrain.pool.block` has the same figure, and a test holds the two together."""

PACKS_HELD = 2
"""Packs whose copies a consumer outside of a pipeline may hold: those in flight to it (`DEPTH` of
`flowtrain.runtime.flow_producers`; a test holds the two together)."""

UNBOUNDED_CAP = 2
"""Full packs in the cap of a family whose tokens do not bound its features: what pictures' padding may add."""

FENCE_BYTES = 64 * 2**30
"""No block lies across a multiple of it; `flowtrain.pool.arena` has the same figure, and a test holds them together."""

PAGE_BYTES = 4096
"""Segments are whole pages."""


@dataclass(frozen=True, slots=True)
class PackRoom:
    """`cap`: most vision bytes of a pack, block headers included; `block`: those of the largest block."""

    cap: int
    block: int

    def needed(self, packs: int, segment_bytes: int) -> int:
        """Bytes that so many packs take of a segment of this size, wherever its ring stands."""
        return packs * self.cap + gaps(segment_bytes) * self.block

    def holds(self, packs: int, segment_bytes: int) -> bool:
        return self.needed(packs, segment_bytes) <= segment_bytes

    def segment_bytes(self, packs: int, at_least: int = 0) -> int:
        """The smallest segment from `at_least` bytes on that holds so many packs."""
        segment = max(at_least, self.needed(packs, 0))
        while (needed := self.needed(packs, segment)) > segment:
            segment = needed
        return segment


def packs_together(backbone: Layout, slots: int = 0) -> int:
    """Packs whose features may all lie in one producer's segment; `slots`: of a step, where it lies there whole."""
    return backbone.dp_degree * max(backbone.packs_held, slots)


def packs_received(backbone: Layout) -> int:
    """Packs whose copies a consumer may hold."""
    return PACKS_HELD + backbone.packs_held - 1


def pack_room(config: Config, shape: ModelShape) -> PackRoom:
    """See the page above."""
    return room_of(config.packing, config.max_row_tokens, shape, config.cut, config.model.dtype)


def room_of(packing: PackingConfig, max_row_tokens: int, shape: ModelShape, cut: Cut, dtype: str) -> PackRoom:
    """The same by what it depends on."""
    features, bounded, max_patches = shape.features(cut), shape.bounds_features(cut), packing.max_patches
    per_token = shape.projector.patches_per_token

    def block_bytes(tokens: int) -> int:
        patches = tokens * per_token
        if max_patches is not None and (patches > max_patches or not bounded):
            tokens, patches = min(tokens, max(1, max_patches // per_token)), max_patches
        return BLOCK_HEADER_BYTES + payload_bytes(features, dtype, tokens, patches)

    full = block_bytes(max(packing.max_tokens, max_row_tokens))
    if bounded:
        return PackRoom(full, block_bytes(max_row_tokens))
    cap = full * (UNBOUNDED_CAP if max_patches is None else 1)
    return PackRoom(cap, cap)


def check_pool(config: Config, shape: ModelShape, plan: Plan) -> None:
    """Raises `PlanError` unless every segment holds the packs that may lie in it."""
    layout = plan.consumers.layout
    sending = min(plan.producers.leading, key=lambda rank: rank.segment_bytes)
    _check(config, shape, plan, sending, packs_together(layout), "packs that run together")
    receiving = [rank for rank in plan.consumers.ranks if rank.segment_bytes]
    if receiving:
        smallest = min(receiving, key=lambda rank: rank.segment_bytes)
        _check(config, shape, plan, smallest, packs_received(layout), "packs that it reads from other nodes")


def _check(config: Config, shape: ModelShape, plan: Plan, rank: RankPlan, packs: int, which: str) -> None:
    room, segment = pack_room(config, shape), rank.segment_bytes
    if room.holds(packs, segment):
        return
    pool_bytes = _sharing(plan, rank.node) * to_pages(room.segment_bytes(packs, segment))
    remedies = [f"set pool.bytes to {pool_bytes} or more"]
    tokens = max(config.packing.max_tokens, config.max_row_tokens)
    patches = _most_patches(config, shape, packs, segment)
    if patches >= shape.projector.patches_per_token:
        remedies.append(f"packing.max_patches to {patches} or less")
    raise PlanError(
        f"pool.bytes gives {rank.role} {rank.rank} on node {rank.node} a segment of {segment} bytes, and {packs} "
        f"{which}, of {tokens} tokens of images each, need {room.needed(packs, segment)} bytes: "
        f"{', or '.join(remedies)}, or lower packing.max_tokens"
    )


def _most_patches(config: Config, shape: ModelShape, packs: int, segment_bytes: int) -> int:
    """The most patches of a pack with which the segment would do."""
    full = max(config.packing.max_tokens, config.max_row_tokens) * shape.projector.patches_per_token

    def holds(max_patches: int) -> bool:
        packing = config.packing.model_copy(update={"max_patches": max_patches})
        room = room_of(packing, config.max_row_tokens, shape, config.cut, config.model.dtype)
        return room.holds(packs, segment_bytes)

    return bisect_right(range(1, UNBOUNDED_CAP * full + 1), False, key=lambda patches: not holds(patches))


def _sharing(plan: Plan, node: int) -> int:
    """Owners of segments of a node, those that may come included."""
    receiving = (rank for rank in plan.consumers.ranks if rank.segment_bytes)
    return sum(1 for rank in (*plan.producers.leading, *plan.spare, *receiving) if rank.node == node)


def gaps(segment_bytes: int) -> int:
    """Places of a segment that a block may not lie across, its end included."""
    return max(1, -(-segment_bytes // FENCE_BYTES))


def to_pages(size: int) -> int:
    """Rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
