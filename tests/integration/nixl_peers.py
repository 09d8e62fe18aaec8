"""Plain processes that share a pool over NIXL, started by a test: `python nixl_peers.py ROLE FD,… [ARGUMENT …]`.

| role | does |
|---|---|
| `owner` | puts, checks and frees as its readers tell it, one pipe each, until all have ended |
| `random` | a reader that tells its owners what to do, seeded, and checks every byte in both directions |
| `repeat` | a reader that reads (or writes) one large block again and again, until its owner is lost |

Every byte of a block is a function of its position and of what it is (features or gradients), so that any byte in a
wrong place is seen.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from flowtrain.errors import LostProcessError
from flowtrain.pool.address import owner_of
from flowtrain.pool.arena import ArenaFullError
from flowtrain.pool.block import block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport import NixlTransport, Span, make_transports
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId

OWNER, READER = 3, 40
SEGMENT_BYTES = 1 << 26
LARGE_BYTES = 1 << 24
READ_SECONDS = 60.0


def pattern(position: int, num_bytes: int, kind: int) -> torch.Tensor:
    """`kind` 0: features, 1: gradients."""
    numbers = torch.arange(num_bytes, dtype=torch.int64) + position * 1_000_003 + kind * 7_919
    return ((numbers * 2_654_435_761) >> 7).to(torch.uint8)


def pattern_of(ref: EmbeddingRef, kind: int) -> torch.Tensor:
    return pattern(ref.position, ref.bytes, kind)


def client(owner: int, timeout: float = READ_SECONDS) -> PoolClient:
    segment = Segment.create(owner, SEGMENT_BYTES, f"nixl-peer-{owner}")
    return PoolClient(segment, make_transports(["nixl"], segment), timeout_seconds=timeout)


def ref_of(position: int, address: Any, num_bytes: int) -> EmbeddingRef:
    specs = (TensorSpec(0, (num_bytes,), "uint8"),)
    return EmbeddingRef(position, UnitId(Phase.TRAIN, 1, 0, 0, position), address, num_bytes, specs, ((1, 2, 2),), 0)


def own(pipes: list[Connection], owner: int) -> None:
    pool = client(owner)
    for pipe in pipes:
        pipe.send(pool.handle())
    while pipes:
        for pipe in wait(pipes, READ_SECONDS):
            assert isinstance(pipe, Connection)
            order = pipe.recv()
            if order is None:
                pipes.remove(pipe)
            else:
                pipe.send(follow(pool, *order))
    pool.close()


def follow(pool: PoolClient, what: str, given: Any) -> Any:
    """One order; `put` stops where the segment has no more room."""
    if what == "check":
        return [ref.position for ref in given if not torch.equal(pool.gradients([ref])[0][0], pattern_of(ref, 1))]
    if what == "free":
        return pool.free([ref.address for ref in given])
    refs = []
    with suppress(ArenaFullError):
        for position, num_bytes in given:
            specs = (TensorSpec(0, (num_bytes,), "uint8"),)
            address = pool.put(position, 0, specs, num_bytes, [pattern(position, num_bytes, 0)])
            refs.append(ref_of(position, address, num_bytes))
    return refs


class RandomReader:
    """Draws operations on blocks of 1 byte to 256 KiB, several of all owners in one call."""

    def __init__(self, pipes: list[Connection], seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = client(READER + seed)
        self.pipes = {}
        for pipe in pipes:
            handle: SegmentHandle = pipe.recv()
            self.pool.attach({handle.owner: handle})
            self.pipes[handle.owner] = pipe
        self.position = seed * 10_000_000
        self.alive: list[EmbeddingRef] = []
        self.num_operations = self.num_bytes = 0

    def ask(self, owner: int, what: str, given: Any) -> Any:
        self.pipes[owner].send((what, given))
        return self.pipes[owner].recv()

    def run(self, num_operations: int) -> None:
        while self.num_operations < num_operations:
            what = self.draw.choice(("put", "put", "read", "read", "gradient", "free"))
            if what == "put":
                self.put()
            elif self.alive:
                some = self.draw.sample(self.alive, min(len(self.alive), self.draw.randint(1, 20)))
                self.num_operations += len(some)
                if what != "free":
                    self.read(some, gradients=what == "gradient")
                if what != "read":
                    self.free(some)
        self.free(list(self.alive))
        for pipe in self.pipes.values():
            pipe.send(None)
        self.pool.close()
        print(f"{self.num_operations} operations, {self.num_bytes} bytes", flush=True)

    def put(self) -> None:
        owner, draw = self.draw.choice(sorted(self.pipes)), self.draw
        sizes = [draw.choice((draw.randint(1, 300), draw.randint(1, 1 << 18))) for _ in range(draw.randint(1, 12))]
        given = [(self.position + number, size) for number, size in enumerate(sizes)]
        refs = self.ask(owner, "put", given)
        self.alive += refs
        self.position += len(sizes)
        self.num_operations += len(refs)
        if len(refs) < len(sizes):  # full: what is oldest goes, so that a ring has room again
            self.free(self.alive[: len(self.alive) // 2])

    def read(self, some: list[EmbeddingRef], *, gradients: bool) -> None:
        for ref, (tensor,) in zip(some, self.pool.get_all(some), strict=True):
            assert torch.equal(tensor, pattern_of(ref, 0)), f"features of {ref.position} differ"
        if gradients:
            for ref in some:
                self.pool.put_gradients([ref], [[pattern_of(ref, 1)]])
            self.pool.flush()
        self.pool.release(some)
        self.num_bytes += sum(ref.bytes for ref in some) * (1 + gradients)
        if gradients:
            for owner, refs in self.by_owner(some).items():
                wrong = self.ask(owner, "check", refs)
                assert not wrong, f"gradients of {wrong} differ"

    def free(self, some: list[EmbeddingRef]) -> None:
        for owner, refs in self.by_owner(some).items():
            self.ask(owner, "free", refs)
        gone = {ref.address for ref in some}
        self.alive = [ref for ref in self.alive if ref.address not in gone]

    def by_owner(self, some: list[EmbeddingRef]) -> dict[int, list[EmbeddingRef]]:
        return {owner: [ref for ref in some if owner_of(ref.address) == owner] for owner in self.pipes}


def repeat(pipe: Connection, operation: str, timeout: float) -> None:
    """Says `moving` after the first, then goes on until the owner is lost; says how, and how long that took."""
    transport = NixlTransport(Segment.create(READER, SEGMENT_BYTES, "nixl-peer-copies"))
    transport.attach(pipe.recv())
    pipe.send(("put", [(0, LARGE_BYTES)]))
    (ref,) = pipe.recv()
    spans = [Span(ref.address, block_bytes(ref.bytes))]
    transport.read(spans, timeout)
    print("moving", flush=True)
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            if operation == "write":
                transport.write(spans, timeout)
            else:
                transport.release(spans)
                transport.read(spans, timeout)
    except LostProcessError as error:
        print(f"{time.monotonic() - started:.3f} {error}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    role, pipes = sys.argv[1], [Connection(int(number)) for number in sys.argv[2].split(",")]
    if role == "owner":
        own(pipes, int(sys.argv[3]))
    elif role == "random":
        RandomReader(pipes, seed=int(sys.argv[3])).run(int(sys.argv[4]))
    else:
        repeat(pipes[0], sys.argv[3], float(sys.argv[4]))


if __name__ == "__main__":
    main()
