"""An owner's pool and a reader of it: in this process, in another one, or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import ray
import torch

from flowtrain.messages import PoolUse
from flowtrain.pool.client import PoolClient
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.segment import OwnSegment, Segment
from flowtrain.pool.transport import TRANSPORTS, make_transports
from flowtrain.pool.transport.nixl_agent import why_missing
from flowtrain.runtime.ray_transport import RayTransport, SegmentServer, own_endpoint
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId

SEGMENT_BYTES = 1 << 20
SECONDS = 60.0
PAIRS = ["local", "local-shared", "shm", "shm-spawned", "nixl", "nixl-spawned", "ray"]
HERE = sorted(name for name in TRANSPORTS if name != "nixl" or why_missing() is None)
"""Those whose packages are installed."""

COPYING = frozenset({"nixl", "ray"})
"""Transports whose reader has copies."""


def needs_nixl() -> None:
    """Skip, with the reason, where the extra is not installed."""
    if missing := why_missing():
        pytest.skip(missing)


def owner_of_segment(pair: str, num_bytes: int = SEGMENT_BYTES, *, checksum: bool = False) -> PoolClient:
    """A client with a segment of the kind that the pair needs."""
    segment: OwnSegment = PrivateSegment(5, num_bytes) if pair == "local" else Segment.create(5, num_bytes, "test")
    names = ["local", "nixl"] if pair.startswith("nixl") else ["local"]
    return PoolClient(segment, make_transports(names, segment), checksum=checksum)


def reading_client(transport: str) -> PoolClient:
    """A client that only reads; where the transport copies, it has a segment for the copies."""
    if transport not in COPYING:
        return PoolClient(None, make_transports([transport]), timeout_seconds=SECONDS)
    segment = Segment.create(9, SEGMENT_BYTES, "test-copies")
    transports = {"ray": RayTransport(segment, None)} if transport == "ray" else make_transports([transport], segment)
    return PoolClient(segment, transports, timeout_seconds=SECONDS)


class Reader:
    """A pool that only reads. `keep` holds views under a name, `look` returns copies of what they show now."""

    def __init__(self, transport: str) -> None:
        self.pool = reading_client(transport)
        self.kept: dict[str, list[torch.Tensor]] = {}

    def do(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def attach(self, handles: Any) -> None:
        self.pool.attach(handles)

    def detach(self, owner: int) -> None:
        self.pool.detach([owner])

    def get(self, ref: EmbeddingRef) -> list[torch.Tensor]:
        copies = [view.clone() for view in self.pool.get(ref)]
        self.pool.release([ref])
        return copies

    def get_all(self, refs: tuple[EmbeddingRef, ...]) -> list[torch.Tensor]:
        """First tensor of each, read in one call."""
        copies = [tensors[0].clone() for tensors in self.pool.get_all(refs)]
        self.pool.release(refs)
        return copies

    def keep(self, name: str, ref: EmbeddingRef) -> None:
        self.kept[name] = self.pool.get(ref)

    def look(self, name: str) -> list[torch.Tensor]:
        return [view.clone() for view in self.kept[name]]

    def put_gradient(self, ref: EmbeddingRef, grads: list[torch.Tensor]) -> None:
        self.pool.put_gradients([ref], [grads])
        self.pool.flush()

    def put_gradient_later(self, ref: EmbeddingRef, grads: list[torch.Tensor]) -> None:
        self.pool.put_gradients([ref], [grads])

    def release(self, ref: EmbeddingRef) -> None:
        self.pool.release([ref])

    def use(self) -> PoolUse:
        return self.pool.use()

    def drop(self) -> None:
        self.kept.clear()
        self.pool.close()


def serve(connection: Connection) -> None:
    """The other process's end: calls in, results or errors out; tensors travel as raw bytes."""
    readers: dict[int, Reader] = {}
    while True:
        message = connection.recv()
        if message is None:
            return
        number, transport, method, args = message
        try:
            if number not in readers:
                readers[number] = Reader(transport)
            reader = readers[number]
            result = reader.do(method, *(_unpacked(arg) for arg in args))
            connection.send((_packed(result), None))
        except Exception as error:
            connection.send((None, error))


def _packed(value: Any) -> Any:
    if isinstance(value, list):
        return [(bytes(t.contiguous().view(torch.uint8).numpy()), tuple(t.shape), t.dtype) for t in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape) for raw, shape, dtype in value]
    return value


class RemoteReader:
    """The same calls, made in another process."""

    def __init__(self, connection: Connection, number: int, transport: str) -> None:
        self.connection = connection
        self.number = number
        self.transport = transport

    def do(self, method: str, *args: Any) -> Any:
        self.connection.send((self.number, self.transport, method, [_packed(arg) for arg in args]))
        assert self.connection.poll(SECONDS), f"the reader did not answer {method} in {SECONDS:.0f} s"
        result, error = self.connection.recv()
        if error is not None:
            raise error
        return _unpacked(result)


class OwnerActor(SegmentServer):
    """An owner's client inside an actor, one for each test; it answers readers as a stage's actor does."""

    def open(self) -> None:
        segment = Segment.create(5, SEGMENT_BYTES, "test")
        self.pool = PoolClient(segment, {"ray": RayTransport(segment, own_endpoint())})
        self.serve(segment)

    def do(self, method: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        try:
            return getattr(self.pool, method)(*args), None
        except Exception as error:
            return None, error


class ActorOwner:
    """The calls of a `PoolClient`, made in an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        ray.get(actor.open.remote(), timeout=SECONDS)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            plain = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            result, error = ray.get(self._actor.do.remote(method, plain), timeout=SECONDS)
            if error is not None:
                raise error
            return result

        return call


class Pair:
    """An owner's pool and a reader that is attached to it by `transport`."""

    def __init__(self, owner: PoolClient | ActorOwner, reader: Reader | RemoteReader, transport: str = "") -> None:
        self.owner = owner
        self.reader = reader
        self.transport = transport

    def put(self, position: int, tensors: list[torch.Tensor], version: int = 0) -> EmbeddingRef:
        specs, end = specs_of(tensors)
        address = self.owner.put(position, version, specs, end, tensors)
        unit = UnitId(Phase.TRAIN, 1, 0, 0, position)
        return EmbeddingRef(position, unit, address, end, specs, ((1, 2, 2),), version)


def specs_of(tensors: list[torch.Tensor]) -> tuple[tuple[TensorSpec, ...], int]:
    specs, end = [], 0
    for tensor in tensors:
        specs.append(TensorSpec(end, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        end = -(-(end + tensor.nbytes) // 64) * 64
    return tuple(specs), end
