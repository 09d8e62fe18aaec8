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
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.config.schema import ClusterConfig
from flowtrain.plan import RankPlan
from flowtrain.pool.block import block_bytes
from flowtrain.pool.client import PoolClient
from flowtrain.pool.measure import MIB, ROUNDS
from flowtrain.pool.segment import Segment, SegmentHandle
from flowtrain.pool.transport.nixl_agent import why_missing
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.nodes import Node
from flowtrain.runtime.ray_transport import SegmentServer, own_endpoint
from flowtrain.runtime.stage_pool import make_carriers
from flowtrain.types import Address, EmbeddingRef, Phase, Role, TensorSpec, UnitId

NUM_BLOCKS = 4
CALL_SECONDS = 60.0
OBJECT_STORE_BYTES = 512 * MIB
TENSORS, ZERO_COPY, ARRAYS = "tensors", "tensors, zero-copy", "arrays"
ZERO_COPY_ENVIRONMENT = {"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}


class PoolSide(SegmentServer):
    """One end of a pair, with a segment for each transport. Blocks of one size go round each of them."""

    def __init__(self, owner: int, payload_bytes: int, transports: Sequence[str]) -> None:
        self.payload_bytes = payload_bytes
        self.specs = (TensorSpec(0, (payload_bytes,), "uint8"),)
        self.pools: dict[str, PoolClient] = {}
        self.live: dict[str, deque[Address]] = {name: deque() for name in transports}
        for name in transports:
            segment = Segment.create(owner, NUM_BLOCKS * block_bytes(payload_bytes), "flowtrain-pool-bench")
            if name == "ray":
                self.serve(segment)
            reached_by = make_carriers([name], segment, own_endpoint())
            self.pools[name] = PoolClient(segment, reached_by, timeout_seconds=CALL_SECONDS)
        self.source = np.random.default_rng(owner).integers(0, 256, payload_bytes, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.source)
        torch.set_num_threads(os.cpu_count() or 1)  # Ray copies with threads of its own

    def handles(self) -> dict[str, SegmentHandle]:
        """Of each transport's segment."""
        return {name: handle for name, pool in self.pools.items() if (handle := pool.handle()) is not None}

    def attach(self, handles: dict[str, SegmentHandle]) -> None:
        for name, handle in handles.items():
            self.pools[name].attach({handle.owner: handle})

    def put(self, transport: str, position: int) -> tuple[EmbeddingRef, float]:
        pool, live = self.pools[transport], self.live[transport]
        start = time.perf_counter()
        if len(live) == NUM_BLOCKS:
            pool.free((live.popleft(),))
        address = pool.put(position, 0, self.specs, self.payload_bytes, (self.tensor,))
        seconds = time.perf_counter() - start
        live.append(address)
        unit = UnitId(Phase.TRAIN, 1, 0, 0, position)
        return EmbeddingRef(position, unit, address, self.payload_bytes, self.specs, (), 0), seconds

    def get(self, transport: str, ref: EmbeddingRef) -> tuple[int, float]:
        """The sum of a few bytes, so that what arrived can be compared; seconds."""
        pool = self.pools[transport]
        start = time.perf_counter()
        (tensor,) = pool.get(ref)
        seconds = time.perf_counter() - start
        told = int(tensor[:: MIB // 4].sum())
        pool.release((ref,))
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
    nodes: tuple[str, str], transports: Sequence[str], payload_bytes: int, rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, float]]:
    """Best put + get between two nodes: by the pool over each transport, and by Ray's object store in each way."""
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(PoolSide)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    sides = [
        actor.options(scheduling_strategy=place, runtime_env=environment).remote(number, payload_bytes, carriers)
        for number, (environment, place, carriers) in enumerate(
            (environment, place, carriers)
            for environment, carriers in (({}, transports), (ZERO_COPY_ENVIRONMENT, ()))
            for place in places
        )
    ]
    owner, reader, flagged_owner, flagged_reader = sides
    ways = {
        TENSORS: (owner, reader, True),
        ZERO_COPY: (flagged_owner, flagged_reader, True),
        ARRAYS: (owner, reader, False),
    }
    try:
        _call(reader.attach.remote(_call(owner.handles.remote())))
        best_pool, best_ray = dict.fromkeys(transports, float("inf")), dict.fromkeys(ways, float("inf"))
        for position in range(rounds + 2):  # two to warm up
            for transport in transports:
                ref, put_seconds = _call(owner.put.remote(transport, position))
                told, get_seconds = _call(reader.get.remote(transport, ref))
                assert told == _call(owner.told.remote()), f"the pool brought other bytes over {transport}"
                if position >= 2:
                    best_pool[transport] = min(best_pool[transport], put_seconds + get_seconds)
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


def timed(owner: Any, reader: Any, transport: str, rounds: int) -> float:
    """Best seconds of put + get of a block from the one `PoolSide` to the other, over one transport."""
    handles = _call(owner.handles.remote())
    _call(reader.attach.remote({transport: handles[transport]}))
    best = float("inf")
    for position in range(rounds + 1):  # one to warm up
        ref, put_seconds = _call(owner.put.remote(transport, position))
        told, get_seconds = _call(reader.get.remote(transport, ref))
        assert told == _call(owner.told.remote()), f"the pool brought other bytes over {transport}"
        if position:
            best = min(best, put_seconds + get_seconds)
    return best


def ray_rows(address: str | None, payload_bytes: int = 16 * MIB, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Figures within this machine and, on a cluster, between every two of its nodes.

    `address`: a running cluster; None: a local one, ended again.
    """
    with Cluster(ClusterConfig(address=address), OBJECT_STORE_BYTES) as cluster:
        if address is None:
            cluster.start([RankPlan(role, 0, "cpu", 1) for role in (Role.PRODUCER, Role.CONSUMER)])
        else:
            cluster.join()
        size, nodes = f"{payload_bytes // MIB} MiB", cluster.nodes
        rows = _rows(f"{size} on one machine", (nodes[0], nodes[0]), ["shm"], payload_bytes, rounds)
        for pair in itertools.combinations(nodes, 2):
            between = ["ray"] if why_missing() else ["nixl", "ray"]
            what = f"{size}, node {pair[0].number} to {pair[1].number}"
            rows += _rows(what, pair, between, payload_bytes, rounds)
        return rows


def _rows(
    what: str, nodes: tuple[Node, Node], transports: Sequence[str], payload_bytes: int, rounds: int
) -> list[dict[str, Any]]:
    pool, store = pair_seconds((nodes[0].id, nodes[1].id), transports, payload_bytes, rounds)

    def speed(figure: str, seconds: float) -> dict[str, Any]:
        return {"figure": figure, "value": payload_bytes / seconds / 1e9, "unit": "GB/s"}

    rows = [speed(f"put + get, {what}, {name}", seconds) for name, seconds in pool.items()]
    for way, seconds in store.items():
        rows.append(speed(f"ray.put + ray.get of {way}, {what}", seconds))
        for name, ours in pool.items():
            rows.append({"figure": f"pool over Ray, {way}, {what}, {name}", "value": seconds / ours, "unit": "x"})
    return rows


def _call(ref: Any) -> Any:
    return ray.get(ref, timeout=CALL_SECONDS)
