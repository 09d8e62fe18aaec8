"""How a pair of processes reaches each other, from the handle alone."""

from __future__ import annotations

import os

import pytest

from flowtrain.errors import PlanError
from flowtrain.pool.host import host_identity
from flowtrain.pool.segment import SegmentHandle
from flowtrain.pool.transport import choose_transports

HERE, MINE = "here", os.getpid()
BOTH = {"nixl": b"n", "ray": b"r"}


def handle(
    pid: int = 1, fd: int = 3, host: str = HERE, endpoints: dict[str, bytes] | None = None, owner: int = 0
) -> SegmentHandle:
    return SegmentHandle(owner, pid, fd, 4096, 1, host, endpoints=endpoints or {})


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
        (handle(host="there", endpoints=BOTH), ["shm", "nixl", "ray", "copies"], "copies"),
        (handle(endpoints=BOTH), ["shm", "nixl", "ray", "copies"], "shm"),
    ],
)
def test_the_nearest_way_that_both_have(there: SegmentHandle, available: list[str], chosen: str) -> None:
    assert choose_transports([there], HERE, available) == {0: chosen}


def test_all_copies_come_by_one_transport() -> None:
    """They lie in one ring of the reader; a node may lack a transport that another has."""
    far = handle(host="there", endpoints=BOTH)
    farther = handle(host="there", endpoints={"ray": b"r"}, owner=1)
    near = handle(owner=2)
    available = ["shm", "nixl", "ray"]
    assert choose_transports([far, farther, near], HERE, available) == {0: "ray", 1: "ray", 2: "shm"}
    assert choose_transports([far], HERE, available, in_use=["shm", "ray"]) == {0: "ray"}
    assert choose_transports([], HERE, available) == {}
    with pytest.raises(PlanError, match=r"owner 1 .*transports of this process \(shm, nixl\); its own are ray"):
        choose_transports([farther], HERE, available, in_use=["nixl"])


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
        choose_transports([there], HERE, available)


def test_this_machine_has_one_identity() -> None:
    assert host_identity() == host_identity() != ""
