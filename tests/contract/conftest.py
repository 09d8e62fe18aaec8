"""Pairs of processes that share a pool, one of each kind."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pool_pairs
import pytest
import ray
from pool_pairs import (
    PAIRS,
    SECONDS,
    ActorOwner,
    OwnerActor,
    Pair,
    Reader,
    RemoteReader,
    needs_nixl,
    owner_of_segment,
    serve,
)

from flowtrain.config.schema import ClusterConfig
from flowtrain.plan import RankPlan
from flowtrain.pool.client import PoolClient
from flowtrain.runtime.cluster import Cluster
from flowtrain.types import Role

numbers = itertools.count()
"""Of the readers in another process: each test has one of its own."""


@pytest.fixture(scope="module")
def remote() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    yield mine
    mine.send(None)
    process.join(SECONDS)
    assert process.exitcode == 0
    process.close()
    mine.close()


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """An actor on a Ray node of its own, to be told to open a segment for each test."""
    cluster = Cluster(ClusterConfig())
    cluster.start([RankPlan(Role.PRODUCER, 0, "cpu", 1)])
    ray.cloudpickle.register_pickle_by_value(pool_pairs)  # Ray's processes cannot import what lies beside the tests
    yield ray.remote(concurrency_groups={"control": 2})(OwnerActor).options(num_cpus=0).remote()
    ray.cloudpickle.unregister_pickle_by_value(pool_pairs)
    cluster.close()


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport = request.param.partition("-")[0]
    if transport == "nixl":
        needs_nixl()
    owner: PoolClient | ActorOwner
    owner = ActorOwner(request.getfixturevalue("actor")) if transport == "ray" else owner_of_segment(request.param)
    reader: Reader | RemoteReader
    if request.param.endswith("-spawned"):
        reader = RemoteReader(request.getfixturevalue("remote"), next(numbers), transport)
    else:
        reader = Reader(transport)
    handle = owner.handle()
    assert handle is not None
    reader.do("attach", {5: handle})
    yield Pair(owner, reader, transport)
    reader.do("drop")
    owner.close()
