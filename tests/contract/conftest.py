"""Pairs of processes that share a pool, one of each kind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from pool_pairs import PAIRS, SECONDS, Pair, Reader, RemoteReader, owner_of_segment, serve


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


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport = request.param.partition("-")[0]
    owner = owner_of_segment(request.param)
    reader: Reader | RemoteReader = Reader(transport)
    if request.param == "shm-spawned":
        reader = RemoteReader(request.getfixturevalue("remote"), id(owner))
    handle = owner.handle()
    assert handle is not None
    reader.do("attach", {5: handle})
    yield Pair(owner, reader)
    reader.do("drop")
    owner.close()
