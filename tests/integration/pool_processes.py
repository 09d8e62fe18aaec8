"""Processes that hold and use pool memory and can be killed: each does what it is told over a pipe.

They are forked from a server that has loaded torch already, so that each costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.space import OwnerSpace
from flowtrain.pool.transport import make_transports
from flowtrain.types import Address, EmbeddingRef, Phase, TensorSpec, UnitId

SECONDS = 60.0
PRIME = 251
MAX_BYTES = 1 << 17
MAX_LIVE = 32
"""Blocks of a process that others have: the messages about them fit into a pipe, so nobody waits to send one."""

_PATTERN = (torch.arange(PRIME + MAX_BYTES) % PRIME).to(torch.uint8)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["flowtrain.pool.client"])


def pattern(position: int, num_bytes: int) -> torch.Tensor:
    """Bytes that no other position of a run of `PRIME` has; negative positions are patterns of gradients."""
    start = position % PRIME
    return _PATTERN[start : start + num_bytes]


def specs_of(num_bytes: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(0, (num_bytes,), "uint8"),)


def ref_of(position: int, address: Address, num_bytes: int) -> EmbeddingRef:
    unit = UnitId(Phase.TRAIN, 1, 0, 0, position)
    return EmbeddingRef(position, unit, address, num_bytes, specs_of(num_bytes), (), 0)


class End:
    """What a process can be told to do."""

    def __init__(self) -> None:
        self.pool = PoolClient(None, make_transports(["shm"]))
        self.views: dict[int, torch.Tensor] = {}

    def own(self, owner: int, num_bytes: int) -> SegmentHandle | None:
        self.pool = PoolClient(Segment.create(owner, num_bytes, "flowtrain-pool-fault"), make_transports(["shm"]))
        return self.pool.handle()

    def attach(self, handle: SegmentHandle) -> None:
        self.pool.attach({handle.owner: handle})

    def put(self, position: int, num_bytes: int) -> EmbeddingRef:
        address = self.pool.put(position, 0, specs_of(num_bytes), num_bytes, (pattern(position, num_bytes),))
        return ref_of(position, address, num_bytes)

    def reserve(self, position: int, num_bytes: int) -> EmbeddingRef:
        """A block that is allocated and never written."""
        return ref_of(position, self.pool.put(position, 0, specs_of(num_bytes), num_bytes, None), num_bytes)

    def hold(self, ref: EmbeddingRef) -> bool:
        """Keep a view; whether every byte is right."""
        (self.views[ref.position],) = self.pool.get(ref)
        return self.still(ref)

    def still(self, ref: EmbeddingRef) -> bool:
        return torch.equal(self.views[ref.position], pattern(ref.position, ref.bytes))

    def half_gradient(self, ref: EmbeddingRef) -> None:
        """As far as a writer is that dies in the middle: half the bytes, and the header of the features."""
        self.hold(ref)
        self.views[ref.position][: ref.bytes // 2] = 255

    def gradient(self, ref: EmbeddingRef) -> None:
        self.pool.put_gradients([ref], [(pattern(-ref.position, ref.bytes),)])
        self.pool.flush()
        self.pool.release([ref])

    def has_gradient(self, ref: EmbeddingRef) -> bool:
        return torch.equal(self.pool.gradients([ref])[0][0], pattern(-ref.position, ref.bytes))

    def free(self, address: Address) -> None:
        self.pool.free([address])

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def close(self) -> None:
        self.views.clear()
        self.pool.close()


def serve(connection: Connection) -> None:
    end = End()
    while True:
        message = connection.recv()
        if message is None:
            end.close()
            return
        method, args = message
        try:
            connection.send((getattr(end, method)(*args), None))
        except Exception as error:
            connection.send((None, error))


class Remote:
    """The other end, from the test's side."""

    def __init__(self, connection: Connection, process: Any) -> None:
        self.connection = connection
        self.process = process

    def send(self, method: str, *args: Any) -> None:
        self.connection.send((method, args))

    def answer(self, within: float = SECONDS) -> Any:
        assert self.connection.poll(within), f"no answer within {within:g} s"
        value, error = self.connection.recv()
        if error is not None:
            raise error
        return value

    def do(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)


@contextmanager
def ends(number: int) -> Iterator[list[Remote]]:
    """So many processes; whatever is left of them is ended."""
    remotes = []
    for _ in range(number):
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,))
        process.start()
        theirs.close()
        remotes.append(Remote(mine, process))
    try:
        yield remotes
    finally:
        for remote in remotes:
            with suppress(OSError):
                remote.connection.send(None)
        for remote in remotes:
            remote.process.join(SECONDS)
            if remote.process.is_alive():
                remote.kill()
            remote.process.close()
            remote.connection.close()


def traffic(me: int, inboxes: list[Any], handles: Any, num_operations: int, seed: int, result: Any) -> None:
    """One of several processes that put, read, overwrite and free at random, each byte checked at every step.

    Messages: (`block`, ref, from whom, gradient wanted), (`back`, ref, gradient written), (`done`, from whom).
    """
    torch.set_num_threads(1)
    dice = random.Random(seed * 100 + me)
    space = OwnerSpace(me, 1 << 20)  # runs the same ring as the client's, and knows what fits
    pool = PoolClient(Segment.create(me, 1 << 20, f"flowtrain-pool-traffic-{me}"), make_transports(["shm"]))
    handles.put(pool.handle())
    known = {}
    while len(known) < len(inboxes):
        handle = inboxes[me].get()
        known[handle.owner] = handle
    pool.attach(known)
    inbox, done, told, operations, live, checked = inboxes[me], {me}, False, 0, {}, 0
    others = [number for number in range(len(inboxes)) if number != me]
    while len(done) < len(inboxes) or not told:
        num_bytes = dice.choice((1, 64, 700, 4096, 20_000))
        want = operations < num_operations and len(live) < MAX_LIVE and space.room((num_bytes,))
        if want and (inbox.empty() or dice.random() < 0.5):
            position = dice.randrange(1, 1 << 30)
            address = pool.put(position, me, specs_of(num_bytes), num_bytes, (pattern(position, num_bytes),))
            assert address == space.allocate(num_bytes)
            unit = UnitId(Phase.TRAIN, 1, 0, 0, position)
            ref = EmbeddingRef(position, unit, address, num_bytes, specs_of(num_bytes), (), me)
            live[address] = ref
            inboxes[dice.choice(others)].put(("block", ref, me, dice.random() < 0.5))
            operations += 1
            continue
        if not told and operations >= num_operations and not live:
            told = True
            for other in others:
                inboxes[other].put(("done", me))
            continue
        kind, *rest = inbox.get()
        if kind == "done":
            done.add(rest[0])
            continue
        operations += 2
        if kind == "block":
            ref, owner, gradient = rest
            (view,) = pool.get(ref)
            assert torch.equal(view, pattern(ref.position, ref.bytes)), (
                f"block {ref.position} of {owner} has other bytes"
            )
            if gradient:
                pool.put_gradients([ref], [(pattern(-ref.position, ref.bytes),)])
                pool.flush()
            pool.release([ref])
            inboxes[owner].put(("back", ref, gradient))
        else:
            ref, gradient = rest
            if gradient:
                found = pool.gradients([ref])[0][0]
                assert torch.equal(found, pattern(-ref.position, ref.bytes)), (
                    f"gradient of {ref.position} has other bytes"
                )
            pool.free([ref.address])
            space.free(ref.address)
            del live[ref.address]
        checked += ref.bytes
    assert not live
    assert space.arena.used == 0
    pool.close()
    result.put((me, operations, checked))
