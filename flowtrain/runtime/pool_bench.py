"""The pool beside Ray's object store, between two actors: on this machine, and between any two nodes of a cluster.

actor A                                actor B
  put ─▶ reference ── a message ──▶      get               timed: put and get, not the message
  ray.put ─▶ ObjectRef ── a message ─▶   ray.get           the same bytes, alternately, best of the rounds

| Ray carries | how |
|---|---|
| tensors | as the pool does: torch tensors are put, torch tensors are got |
| tensors, zero-copy | the same with `RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1`, experimental and off by default |
| arrays | NumPy arrays over the same bytes, which its serializer copies once and maps for reading only |
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.pool.block import block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.measure import MIB, ROUNDS
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport import TRANSPORTS, make_transports
from flowtrain.pool.transport.nixl_agent import why_missing
from flowtrain.types import Address, EmbeddingRef, Phase, TensorSpec, UnitId

NUM_BLOCKS = 4
CALL_SECONDS = 60.0
OBJECT_STORE_BYTES = 512 * MIB
TENSORS, ZERO_COPY, ARRAYS = "tensors", "tensors, zero-copy", "arrays"
ZERO_COPY_ENVIRONMENT = {"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}


class PoolSide:
    """One end of a pair. Blocks of one size go round its segment; `transport` is the only one it has."""

    def __init__(self, owner: int, payload_bytes: int, transport: str) -> None:
        self.payload_bytes = payload_bytes
        self.specs = (TensorSpec(0, (payload_bytes,), "uint8"),)
        segment = Segment.create(owner, NUM_BLOCKS * block_bytes(payload_bytes), "flowtrain-pool-bench")
        self.pool = PoolClient(segment, make_transports([transport], segment), timeout_seconds=CALL_SECONDS)
        self.source = np.random.default_rng(owner).integers(0, 256, payload_bytes, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.source)
        self.live: list[Address] = []
        torch.set_num_threads(1)

    def handle(self) -> SegmentHandle | None:
        return self.pool.handle()

    def attach(self, handle: SegmentHandle) -> None:
        self.pool.attach({handle.owner: handle})

    def put(self, position: int) -> tuple[EmbeddingRef, float]:
        start = time.perf_counter()
        if len(self.live) == NUM_BLOCKS:
            self.pool.free((self.live.pop(0),))
        address = self.pool.put(position, 0, self.specs, self.payload_bytes, (self.tensor,))
        seconds = time.perf_counter() - start
        self.live.append(address)
        unit = UnitId(Phase.TRAIN, 1, 0, 0, position)
        return EmbeddingRef(position, unit, address, self.payload_bytes, self.specs, (), 0), seconds

    def get(self, ref: EmbeddingRef) -> tuple[int, float]:
        """The sum of a few bytes, so that what arrived can be compared; seconds."""
        start = time.perf_counter()
        (tensor,) = self.pool.get(ref)
        seconds = time.perf_counter() - start
        told = int(tensor[:: MIB // 4].sum())
        self.pool.release((ref,))
        return told, seconds

    def ray_put(self, as_tensor: bool) -> tuple[list[Any], float]:
        value = self.tensor if as_tensor else self.source
        start = time.perf_counter()
        ref = ray.put(value)
        return [ref], time.perf_counter() - start

    def ray_get(self, refs: list[Any]) -> tuple[int, float]:
        start = time.perf_counter()
        value = ray.get(refs[0], timeout=CALL_SECONDS)
        seconds = time.perf_counter() - start
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        return int(array[:: MIB // 4].sum(dtype=np.int64)), seconds

    def told(self) -> int:
        return int(self.source[:: MIB // 4].sum(dtype=np.int64))


def pair_seconds(
    nodes: tuple[str, str], transport: str, payload_bytes: int, rounds: int = ROUNDS
) -> tuple[float, dict[str, float]]:
    """Best put + get between two nodes: by the pool over this transport, and by Ray's object store in each way."""
    actor = ray.remote(num_cpus=0)(PoolSide)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    sides = [
        actor.options(scheduling_strategy=place, runtime_env=environment).remote(number, payload_bytes, transport)
        for number, (environment, place) in enumerate(
            (environment, place) for environment in ({}, ZERO_COPY_ENVIRONMENT) for place in places
        )
    ]
    owner, reader, flagged_owner, flagged_reader = sides
    ways = {
        TENSORS: (owner, reader, True),
        ZERO_COPY: (flagged_owner, flagged_reader, True),
        ARRAYS: (owner, reader, False),
    }
    try:
        _call(reader.attach.remote(_call(owner.handle.remote())))
        best_pool, best_ray = float("inf"), dict.fromkeys(ways, float("inf"))
        for position in range(rounds + 2):  # two to warm up
            ref, put_seconds = _call(owner.put.remote(position))
            told, get_seconds = _call(reader.get.remote(ref))
            assert told == _call(owner.told.remote()), "the pool brought other bytes"
            if position >= 2:
                best_pool = min(best_pool, put_seconds + get_seconds)
            for way, (giver, taker, as_tensor) in ways.items():
                refs, put_seconds = _call(giver.ray_put.remote(as_tensor))
                told, get_seconds = _call(taker.ray_get.remote(refs))
                assert told == _call(giver.told.remote()), "Ray brought other bytes"
                del refs
                if position >= 2:
                    best_ray[way] = min(best_ray[way], put_seconds + get_seconds)
        return best_pool, best_ray
    finally:
        for side in sides:
            ray.kill(side)


def ray_rows(address: str | None, payload_bytes: int = 16 * MIB, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Figures within this machine and, on a cluster, between every two of its nodes.

    `address`: a running cluster; None: a local one, ended again.
    """
    ours = not ray.is_initialized()
    if ours:
        local: dict[str, Any] = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        ray.init(address=address or "local", log_to_driver=False, **({} if address else local))
    try:
        here = ray.get_runtime_context().get_node_id()
        nodes = [here, *(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here)]
        rows = _rows(f"{payload_bytes // MIB} MiB on one machine", (here, here), "shm", payload_bytes, rounds)
        for first, second in itertools.combinations(range(len(nodes)), 2):
            for transport in sorted(TRANSPORTS.keys() - {"local", "shm"}):
                if transport == "nixl" and why_missing():
                    continue
                what = f"{payload_bytes // MIB} MiB, node {first} to {second}, {transport}"
                rows += _rows(what, (nodes[first], nodes[second]), transport, payload_bytes, rounds)
        return rows
    finally:
        if ours:
            ray.shutdown()


def _rows(what: str, nodes: tuple[str, str], transport: str, payload_bytes: int, rounds: int) -> list[dict[str, Any]]:
    pool, store = pair_seconds(nodes, transport, payload_bytes, rounds)
    rows = [{"figure": f"put + get, {what}", "value": payload_bytes / pool / 1e9, "unit": "GB/s"}]
    for way, seconds in store.items():
        speed = payload_bytes / seconds / 1e9
        rows.append({"figure": f"ray.put + ray.get of {way}, {what}", "value": speed, "unit": "GB/s"})
        rows.append({"figure": f"pool over Ray, {way}, {what}", "value": seconds / pool, "unit": "x"})
    return rows


def _call(ref: Any) -> Any:
    return ray.get(ref, timeout=CALL_SECONDS)
