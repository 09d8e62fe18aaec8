"""How a pair of processes reaches each other, from the handle alone."""

from __future__ import annotations

import os

import pytest

from flowtrain.errors import PlanError
from flowtrain.pool.host import host_identity
from flowtrain.pool.segment import SegmentHandle
from flowtrain.pool.transport import choose_transport

HERE, MINE = "here", os.getpid()
BOTH = {"nixl": b"n", "ray": b"r"}


def handle(pid: int = 1, fd: int = 3, host: str = HERE, endpoints: dict[str, bytes] | None = None) -> SegmentHandle:
    return SegmentHandle(0, pid, fd, 4096, 1, host, endpoints=endpoints or {})


@pytest.mark.parametrize(
    ("there", "available", "chosen"),
    [
        (handle(MINE), ["local", "shm", "nixl", "ray"], "local"),
        (handle(MINE, fd=-1), ["local", "shm"], "local"),
        (handle(MINE), ["shm"], "shm"),
        (handle(), ["local", "shm", "nixl", "ray"], "shm"),
        (handle(endpoints=BOTH), ["nixl", "ray"], "nixl"),
        (handle(host="there", endpoints=BOTH), ["local", "shm", "nixl", "ray"], "nixl"),
        (handle(MINE, host="there", endpoints=BOTH), ["local", "shm", "ray"], "ray"),
        (handle(host="there", endpoints={"ray": b"r"}), ["local", "shm", "nixl", "ray"], "ray"),
        (handle(fd=-1, endpoints={"ray": b"r"}), ["local", "shm", "nixl", "ray"], "ray"),
    ],
)
def test_the_nearest_way_that_both_have(there: SegmentHandle, available: list[str], chosen: str) -> None:
    assert choose_transport(there, HERE, available) == chosen


@pytest.mark.parametrize(
    ("there", "available", "told"),
    [
        (handle(host="there"), ["local", "shm"], "on another machine"),
        (handle(host="there", endpoints={"nixl": b"n"}), ["shm", "ray"], "its own are nixl"),
        (handle(fd=-1), ["local", "shm"], "on this machine"),
        (handle(), [], "none of the transports of this process .none."),
    ],
)
def test_no_way_is_a_sentence(there: SegmentHandle, available: list[str], told: str) -> None:
    with pytest.raises(PlanError, match=rf"{told}.*set pool\.transport"):
        choose_transport(there, HERE, available)


def test_this_machine_has_one_identity() -> None:
    assert host_identity() == host_identity() != ""
