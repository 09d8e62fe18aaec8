"""Two plain processes that share a pool over NIXL, started by a test: `python nixl_peers.py ROLE FD [ARGUMENT …]`.

| role | does |
|---|---|
| `owner` | puts, checks and frees as it is told over the pipe, until told to end |
| `random` | a reader that tells the owner what to do, seeded, and checks every byte in both directions |
| `repeat` | a reader that reads (and writes) one large block again and again, until it fails |

Every byte of a block is a function of its position and of what it is (features or gradients), so that any byte in a
wrong place is seen.
"""

from __future__ import annotations

import random
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowtrain.errors import LostProcessError
from flowtrain.pool.block import block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import Segment
from flowtrain.pool.transport import NixlTransport, Span, make_transports
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId

OWNER, READER = 3, 4
SEGMENT_BYTES = 1 << 26
LARGE_BYTES = 1 << 24
READ_SECONDS = 60.0


def pattern(position: int, num_bytes: int, kind: int) -> torch.Tensor:
    """`kind` 0: features, 1: gradients."""
    numbers = torch.arange(num_bytes, dtype=torch.int64) + position * 1_000_003 + kind * 7_919
    return ((numbers * 2_654_435_761) >> 7).to(torch.uint8)


def client(owner: int, timeout: float = READ_SECONDS) -> PoolClient:
    segment = Segment.create(owner, SEGMENT_BYTES, f"nixl-peer-{owner}")
    return PoolClient(segment, make_transports(["nixl"], segment), timeout_seconds=timeout)


def ref_of(position: int, address: Any, num_bytes: int) -> EmbeddingRef:
    specs = (TensorSpec(0, (num_bytes,), "uint8"),)
    return EmbeddingRef(position, UnitId(Phase.TRAIN, 1, 0, 0, position), address, num_bytes, specs, ((1, 2, 2),), 0)


def own(pipe: Connection) -> None:
    pool = client(OWNER)
    pipe.send(pool.handle())
    while (order := pipe.recv()) is not None:
        what, given = order
        if what == "put":
            refs = []
            for position, num_bytes in given:
                specs = (TensorSpec(0, (num_bytes,), "uint8"),)
                address = pool.put(position, 0, specs, num_bytes, [pattern(position, num_bytes, 0)])
                refs.append(ref_of(position, address, num_bytes))
            pipe.send(refs)
        elif what == "check":
            wrong = [r.position for r in given if not torch.equal(*pool.gradients(r), pattern(r.position, r.bytes, 1))]
            pipe.send(wrong)
        else:
            pool.free([ref.address for ref in given])
            pipe.send(None)
    pool.close()


def read_randomly(pipe: Connection, seed: int, num_operations: int) -> None:
    """Draws operations; blocks of 1 byte to 256 KiB, at most half the segment alive."""
    draw = random.Random(seed)
    pool = client(READER)
    pool.attach({OWNER: pipe.recv()})
    alive: list[EmbeddingRef] = []
    position = done = num_bytes = 0

    def ask(what: str, given: Any) -> Any:
        pipe.send((what, given))
        return pipe.recv()

    while done < num_operations:
        what = draw.choice(("put", "put", "read", "read", "gradient", "free"))
        if what == "put":
            if sum(ref.bytes for ref in alive) > SEGMENT_BYTES // 4:
                continue
            sizes = [draw.choice((draw.randint(1, 300), draw.randint(1, 1 << 18))) for _ in range(draw.randint(1, 12))]
            alive += ask("put", [(position + number, size) for number, size in enumerate(sizes)])
            position += len(sizes)
            done += len(sizes)
            continue
        some = draw.sample(alive, min(len(alive), draw.randint(1, 20)))
        if not some:
            continue
        if what != "free":
            for ref, (tensor,) in zip(some, pool.get_all(some), strict=True):
                assert torch.equal(tensor, pattern(ref.position, ref.bytes, 0)), f"features of {ref.position} differ"
        if what == "gradient":
            for ref in some:
                pool.put_gradient(ref, [pattern(ref.position, ref.bytes, 1)])
            pool.flush()
        if what != "free":
            pool.release(some)
            num_bytes += sum(ref.bytes for ref in some) * (2 if what == "gradient" else 1)
        if what == "gradient":
            wrong = ask("check", some)
            assert not wrong, f"gradients of {wrong} differ"
        if what != "read":
            # In the order of allocation: a ring takes bytes back from its oldest end.
            ask("free", sorted(some, key=lambda ref: ref.position))
            alive = [ref for ref in alive if ref not in some]
        elif draw.random() < 0.5 and alive:
            oldest = alive[: len(alive) // 2]
            ask("free", oldest)
            alive = alive[len(oldest) :]
        done += len(some)
    if alive:
        ask("free", alive)
    pipe.send(None)
    pool.close()
    print(f"{done} operations, {num_bytes} bytes", flush=True)


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
    role, pipe = sys.argv[1], Connection(int(sys.argv[2]))
    if role == "owner":
        own(pipe)
    elif role == "random":
        read_randomly(pipe, int(sys.argv[3]), int(sys.argv[4]))
    else:
        repeat(pipe, sys.argv[3], float(sys.argv[4]))


if __name__ == "__main__":
    main()
