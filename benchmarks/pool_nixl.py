"""Reading 64 MiB from another process over NIXL: through the pool's transport, and by NIXL's own calls alone.

    owner process: one segment, registered with NIXL
        ▲ READ                                        ▲ READ
    bare: descriptors, transfer, state until done     pool: `NixlTransport.read` and `release` of the same blocks

Both read the same prefaulted blocks of the same owner, into the same prefaulted memory of this process, in turns, so
that whatever else the machine does meets both alike. The bare side asks for the state without a pause. It is measured
with and without a progress thread in the reader, and the faster one counts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.record import Check, Result, main
from flowtrain.pool.address import make_address
from flowtrain.pool.block import HEADER_BYTES
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport import NixlTransport, Span
from flowtrain.pool.transport.nixl_agent import PACKAGES, why_missing

BLOCK_BYTES = 64 * 2**20
NUM_BLOCKS = 4
PROCESSES, REPEATS = 3, 6
"""Readers one after the other, and reads by each; the best of all counts."""

SECONDS = 60.0
LIMIT = 0.9
CARRIERS = {"shared memory": "", "TCP": "tcp"}
"""UCX_TLS: what UCX may use; empty leaves it to UCX."""


def own(pipe: Connection) -> None:
    segment = Segment.create(1, NUM_BLOCKS * BLOCK_BYTES, "benchmark-owner")
    segment.memory[:] = bytes(range(256)) * (segment.bytes // 256)
    transport = NixlTransport(segment)
    endpoint = transport.endpoint
    assert endpoint is not None
    pipe.send(segment.handle({"nixl": endpoint}))
    pipe.recv()
    transport.close()
    segment.close()


class Bare:
    """NIXL's documented calls: an agent, registered memory, `initialize_xfer`, `transfer`, `check_xfer_state`."""

    def __init__(self, memory: memoryview, endpoint: bytes, progress_thread: bool) -> None:
        nixl = import_module(next(name for name in PACKAGES if _there(name)))
        config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self.agent = nixl.nixl_agent(f"bare-{os.getpid()}-{progress_thread}", config)
        self.here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.agent.register_memory([(self.here, memory.nbytes, 0, "")], "DRAM")
        self.there = int.from_bytes(endpoint[:8], "little")
        self.peer = self.agent.add_remote_agent(endpoint[8:])

    def read(self, number: int) -> None:
        start = number * BLOCK_BYTES
        here = self.agent.get_xfer_descs([(self.here + start, BLOCK_BYTES, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(self.there + start, BLOCK_BYTES, 0)], "DRAM")
        transfer = self.agent.initialize_xfer("READ", here, there, self.peer)
        state = self.agent.transfer(transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)
        assert state == "DONE", state
        transfer.release()


def _there(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


class Ours:
    def __init__(self, segment: Segment, handle: SegmentHandle) -> None:
        self.transport = NixlTransport(segment)
        self.transport.attach(handle)

    def read(self, number: int) -> None:
        span = [Span(make_address(1, number * BLOCK_BYTES + HEADER_BYTES), BLOCK_BYTES)]
        self.transport.read(span, SECONDS)
        self.transport.release(span)


def measure_carrier(carrier: str, pipe: Connection) -> None:
    """Runs in a process of its own, since UCX reads its settings once; sends seconds by side."""
    if CARRIERS[carrier]:
        os.environ["UCX_TLS"] = CARRIERS[carrier]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,))
    owner.start()
    handle = mine.recv()
    endpoint = handle.endpoints["nixl"]
    segment = Segment.create(2, NUM_BLOCKS * BLOCK_BYTES, "benchmark-reader")
    segment.memory[:] = bytes(segment.bytes)
    sides: dict[str, Callable[[int], None]] = {"pool": Ours(segment, handle).read}
    sides["bare, no thread"] = Bare(segment.memory, endpoint, progress_thread=False).read
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    interleave(sides, seconds)
    # Last, since the thread of this agent spins from its start and would slow the others.
    with_thread = {"bare, thread": Bare(segment.memory, endpoint, progress_thread=True).read}
    seconds |= {name: [] for name in with_thread}
    interleave(with_thread, seconds)
    pipe.send(seconds)
    mine.send(None)
    owner.join(SECONDS)


def interleave(sides: dict[str, Callable[[int], None]], seconds: dict[str, list[float]]) -> None:
    names = list(sides)
    for turn in range(REPEATS + 2):
        for name in names if turn % 2 else reversed(names):
            start = time.perf_counter()
            sides[name](turn % NUM_BLOCKS)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)


def measure(seed: int) -> Result:
    """`seed` has no part in it: every byte is read."""
    rows, checks = [], []
    context = multiprocessing.get_context("spawn")
    for carrier in CARRIERS:
        seconds: dict[str, list[float]] = {}
        for _ in range(PROCESSES):
            mine, theirs = context.Pipe()
            process = context.Process(target=measure_carrier, args=(carrier, theirs))
            process.start()
            for name, found in mine.recv().items():
                seconds.setdefault(name, []).extend(found)
            process.join(SECONDS)
        speed = {name: BLOCK_BYTES / min(found) / 1e9 for name, found in seconds.items()}
        for name, found in seconds.items():
            rows.append(
                {
                    "carrier": carrier,
                    "side": name,
                    "best (ms)": min(found) * 1e3,
                    "median (ms)": statistics.median(found) * 1e3,
                    "GB/s": speed[name],
                }
            )
        bare = max(speed["bare, no thread"], speed["bare, thread"])
        checks.append(
            Check(f"NIXL read of 64 MiB over {carrier}, share of bare speed", speed["pool"] / bare, ">=", LIMIT)
        )
    settings: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": NUM_BLOCKS, "repeats": PROCESSES * REPEATS}
    return Result(settings, rows, checks)


if __name__ == "__main__":
    if missing := why_missing():
        print(f"benchmark pool_nixl: left out, {missing}", file=sys.stderr)
    else:
        main("pool_nixl", lambda options: measure(options.seed))
