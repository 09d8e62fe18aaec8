"""Every rule of `flowtrain doctor` on made nodes, and the facts of this one."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from flowtrain.runtime.checkup import NodeFacts, PairFacts, facts_here, findings, refusal
from flowtrain.runtime.nodes import Sight

GIB = 2**30
FIRST = NodeFacts(
    number=0,
    name="head",
    address="10.0.0.1",
    python="3.11.2",
    code="0123456789ab",
    packages={"torch": "2.14.1", "ray": "2.60.0", "nixl-cu13": "1.5.0"},
    cpus=8,
    memory_bytes=64 * GIB,
    shm_bytes=8 * GIB,
    locked_bytes=-1,
    open_files=-1,
    seen=(Sight("/shared/model/config.json", 700), Sight("/shared/.probe", 40)),
)
SECOND = replace(FIRST, number=1, name="node1", address="10.0.0.2", clock_seconds=0.1, clock_error_seconds=0.002)
GPU = ("NVIDIA H200", 140 * GIB, 18)
UNLINKED = ("NVIDIA L4", 24 * GIB, 0)
GOOD = PairFacts(1, 0, None, {"nixl": 9.0, "ray": 1.0})


def test_nothing_is_found_on_nodes_that_agree() -> None:
    equipped = [replace(node, gpus=(GPU, GPU), told_gpus=2.0) for node in (FIRST, SECOND)]
    assert findings(equipped, [GOOD], pool_bytes=8 * GIB) == []
    bare = replace(FIRST, gpu_reason="no driver: libnvidia-ml.so.1 is not here", told_gpus=0.0)
    assert findings([bare, replace(bare, gpu_reason="CUDA_VISIBLE_DEVICES hides every GPU")]) == []


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        (
            {"packages": {**FIRST.packages, "torch": "2.13.0"}},
            "wrong",
            ("torch", "2.14.1 on node 0", "2.13.0 on node 1"),
        ),
        ({"packages": {"torch": "2.14.1", "nixl-cu13": "1.5.0"}}, "wrong", ("ray", "not installed on node 1")),
        ({"packages": {"torch": "2.14.1", "ray": "2.60.0"}}, "slow", ("nixl-cu13", "not installed on node 1")),
        ({"python": "3.12.1"}, "wrong", ("Python", "3.12.1 on node 1")),
        ({"code": "ba9876543210"}, "wrong", ("FlowTrain", "ba9876543210 on node 1")),
        (
            {"seen": (Sight("/shared/model/config.json", None), FIRST.seen[1])},
            "wrong",
            ("node 1 (10.0.0.2)", "not there"),
        ),
        ({"seen": (Sight("/shared/model/config.json", 701), FIRST.seen[1])}, "wrong", ("config.json is another one",)),
        ({"clock_seconds": -2.0}, "slow", ("-2.00 s", "chrony")),
        ({"gpus": (GPU,), "told_gpus": 2.0}, "wrong", ("started with 2 GPUs", "lists 1")),
        ({"told_gpus": 0.0, "gpu_reason": "driver mismatch"}, "slow", ("none can be used: driver mismatch",)),
        ({"told_gpus": 8.0, "gpu_reason": "driver mismatch"}, "wrong", ("8 GPUs", "lists 0 (driver mismatch)")),
        ({"gpus": (UNLINKED, UNLINKED), "told_gpus": 2.0}, "slow", ("NVLink", "2 GPUs")),
        ({"gpus": (GPU,), "told_gpus": 1.0, "locked_bytes": 65536}, "slow", ("65536 bytes", "ulimit -l")),
        (
            {"gpus": (GPU,), "told_gpus": 1.0, "gpu_numa": (1,), "core_numa": (0,)},
            "slow",
            ("NUMA node 1", "cores of 0", "taskset"),
        ),
        (
            {"gpus": (GPU,), "told_gpus": 1.0, "fixed_pages": "Operation not permitted"},
            "slow",
            ("NUMA", "Operation not permitted", "SYS_NICE"),
        ),
        ({"rdma": True, "locked_bytes": 65536}, "slow", ("65536 bytes", "ulimit -l")),
        ({"shm_bytes": 64 * 2**20}, "slow", ("/dev/shm", str(64 * 2**20), "--shm-size")),
        ({"memory_bytes": GIB}, "wrong", ("pool.bytes", str(8 * GIB), str(GIB))),
        ({"open_files": 512}, "wrong", ("512 files", "ulimit -Hn")),
        (
            {"refused_ports": (("127.0.0.1:9400", "Address already in use"),)},
            "wrong",
            ("127.0.0.1:9400: Address already in use", "telemetry.prometheus_port"),
        ),
    ],
)
def test_a_node_that_differs_is_named(changed: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    (finding,) = findings([FIRST, replace(SECOND, **changed)], [GOOD], pool_bytes=8 * GIB)
    assert finding.level == level
    assert all(word in str(finding) for word in words), finding


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"refused": "timed out"}, "wrong", ("node 0 to 1", "10.0.0.1", "timed out", "open all ports")),
        ({"gigabytes_per_second": {"ray": 1.0}, "failed": {"nixl": "no device"}}, "wrong", ("nixl", "no device")),
        ({"gigabytes_per_second": {"ray": 1.0}}, "slow", ("Ray's object store", "flowtrain[nixl]")),
    ],
)
def test_a_pair_that_does_not_reach(changed: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    (finding,) = findings([FIRST, SECOND], [replace(GOOD, **changed)])
    assert finding.level == level
    assert all(word in str(finding) for word in words), finding


def test_different_devices_are_told_once_and_what_is_wrong_comes_first() -> None:
    nodes = [replace(FIRST, gpus=(GPU,)), replace(SECOND, gpus=(UNLINKED,), open_files=64)]
    found = findings(nodes)
    assert [finding.check for finding in found] == ["open files", "GPUs"]
    assert "NVIDIA H200, NVIDIA L4" in found[1].what


def test_what_is_missing_on_the_first_node_is_told_too() -> None:
    (finding,) = findings([replace(FIRST, seen=(Sight("/absent", None),))])
    assert (finding.level, finding.check, finding.what) == ("wrong", "paths", "/absent is not there")


def test_a_port_that_is_taken_is_known_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in (refusal("127.0.0.1", port) or "")
    assert refusal("127.0.0.1", port) is None
    assert refusal("203.0.113.9", 0) is not None, "an address that this machine does not have"


def test_the_facts_of_this_machine() -> None:
    facts = facts_here(0, "127.0.0.1")
    assert facts.cpus >= 1
    assert facts.memory_bytes > 0
    assert facts.core_numa
    assert {"torch", "ray", "transformers"} <= facts.packages.keys()
    assert facts.code == facts_here(0, "127.0.0.1").code != "e3b0c44298fc", "of files, not of nothing"
