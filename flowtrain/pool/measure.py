"""How fast the pool is on this machine: put + get beside a plain copy, a second reader, reserve + release.

    turn:  plain  block[i mod n].copy_(source)                        ┐ a few blocks each, one after the other, so that
           pool   free(oldest) · put(source) ─▶ ref · get · release   ┘ whatever else the machine does meets both alike

Both kinds of memory are prefaulted and have the same number of blocks in rotation, as many as fill a segment of the
default size (so that both write memory and not caches); one thread; the best of all turns.
The reader is another client over shared memory with a mapping of its own, as in another process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowtrain.pool.block import block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import Segment
from flowtrain.pool.space import OwnerSpace
from flowtrain.pool.transport import make_transports
from flowtrain.types import Address, EmbeddingRef, Phase, TensorSpec, UnitId

MIB = 2**20
ROUNDS = 15
SEGMENT_BYTES = 256 * MIB
TURN_BYTES = 16 * MIB
"""A few milliseconds of copying: short enough to fit between two looks of the scheduler at other work."""


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Best seconds of one block of `payload_bytes`, through the pool and by a plain copy."""

    payload_bytes: int
    pool_seconds: float
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """Speed of the pool over that of a plain copy."""
        return self.plain_seconds / self.pool_seconds


class Rotation:
    """An owner and a reader of one segment, through which blocks of one size go round."""

    def __init__(self, payload_bytes: int, num_blocks: int) -> None:
        self.payload_bytes = payload_bytes
        self.specs = (TensorSpec(0, (payload_bytes,), "uint8"),)
        segment = Segment.create(0, num_blocks * block_bytes(payload_bytes), "flowtrain-pool-measure")
        self.owner = PoolClient(segment, {})
        self.reader = PoolClient(None, make_transports(["shm"]))
        handle = self.owner.handle()
        assert handle is not None
        self.reader.attach({0: handle})
        self.num_blocks = num_blocks
        self.live: deque[Address] = deque()
        self.position = 0

    def put(self, source: torch.Tensor) -> EmbeddingRef:
        """A block with these bytes; the oldest makes room for it."""
        if len(self.live) == self.num_blocks:
            self.owner.free((self.live.popleft(),))
        self.position += 1
        address = self.owner.put(self.position, 0, self.specs, self.payload_bytes, (source,))
        self.live.append(address)
        return EmbeddingRef(self.position, _UNIT, address, self.payload_bytes, self.specs, (), 0)

    def get(self, ref: EmbeddingRef) -> torch.Tensor:
        """A look at a block, ended at once."""
        (view,) = self.reader.get(ref)
        self.reader.release((ref,))
        return view

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


_UNIT = UnitId(Phase.TRAIN, 1, 0, 0, 0)


def copy_time(payload_bytes: int, rounds: int = ROUNDS) -> CopyTime:
    """Put + get of blocks of this size, beside copies into ordinary tensors."""
    num_blocks = max(SEGMENT_BYTES // payload_bytes, 2)
    per_turn = max(TURN_BYTES // payload_bytes, 1)
    source = torch.randint(0, 256, (payload_bytes,), dtype=torch.uint8)
    targets = [torch.zeros(payload_bytes, dtype=torch.uint8) for _ in range(num_blocks)]
    rotation = Rotation(payload_bytes, num_blocks)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best_pool = best_plain = float("inf")
        for _ in range(rounds):
            for first in range(0, num_blocks, per_turn):
                turn = targets[first : first + per_turn]
                start = time.perf_counter()
                for target in turn:
                    target.copy_(source)
                middle = time.perf_counter()
                for _ in turn:
                    rotation.get(rotation.put(source))
                end = time.perf_counter()
                best_plain = min(best_plain, (middle - start) / len(turn))
                best_pool = min(best_pool, (end - middle) / len(turn))
        return CopyTime(payload_bytes, best_pool, best_plain)
    finally:
        torch.set_num_threads(before)
        rotation.close()


def second_reader_seconds(payload_bytes: int, rounds: int = ROUNDS) -> float:
    """Best time of a get of a block that another reader has got already."""
    rotation = Rotation(payload_bytes, 1)
    other = PoolClient(None, make_transports(["shm"]))
    handle = rotation.owner.handle()
    assert handle is not None
    other.attach({0: handle})
    ref = rotation.put(torch.zeros(payload_bytes, dtype=torch.uint8))
    rotation.get(ref)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        other.get(ref)
        best = min(best, time.perf_counter() - start)
        other.release((ref,))
    other.close()
    rotation.close()
    return best


def pairs_per_second(payload_sizes: Sequence[int], num_pairs: int = 50_000, rounds: int = 5) -> float:
    """Reserve + release of blocks of these sizes in one process, in a segment of 64 times the largest, kept full."""
    best = 0.0
    for _ in range(rounds):
        space = OwnerSpace(0, 64 * block_bytes(max(payload_sizes)))
        live: deque[Address] = deque()
        start = time.perf_counter()
        for number in range(num_pairs):
            size = payload_sizes[number % len(payload_sizes)]
            while not space.room((size,)):
                space.free(live.popleft())
            live.append(space.allocate(size))
        best = max(best, num_pairs / (time.perf_counter() - start))
    return best


PAIR_PAYLOADS = tuple(7168 * tokens for tokens in (64, 256, 576, 1024, 1242, 2048, 4096))
"""Features of one sample of so many visual tokens, for a 7 B backbone in bfloat16."""


def pool_rows(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """What `flowtrain pool bench` prints: figure, value, unit; the best of so many rounds."""
    rows: list[dict[str, Any]] = []
    for mib in (64, 16, 1):
        copied = copy_time(mib * MIB, rounds)
        rows.append(_row(f"put + get, {mib} MiB, over the speed of a plain copy", copied.ratio, "x"))
        rows.append(_row(f"plain copy, {mib} MiB", mib * MIB / copied.plain_seconds / 1e9, "GB/s"))
    rows += [_row(f"second reader, {mib} MiB", 1e6 * second_reader_seconds(mib * MIB, rounds), "us") for mib in (1, 64)]
    rows.append(_row("reserve + release", pairs_per_second(PAIR_PAYLOADS, rounds=min(rounds, 5)), "pairs/s"))
    return rows


def _row(figure: str, value: float, unit: str) -> dict[str, Any]:
    return {"figure": figure, "value": value, "unit": unit}
