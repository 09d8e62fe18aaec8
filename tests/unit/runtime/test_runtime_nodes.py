"""Nodes of a cluster: their numbers, their interfaces, and what must be there on each."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from flowtrain.errors import PlanError
from flowtrain.plan import RankPlan
from flowtrain.runtime.nodes import LOOPBACK, check_seen, interface_of, look, number_nodes, who_runs_where
from flowtrain.telemetry.tables import PlaceRow
from flowtrain.types import Role


def node(name: str, address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_the_drivers_node_is_first_and_the_others_follow_by_address() -> None:
    found = [
        node("a", "10.0.0.10", CPU=4.0, GPU=1.0),
        node("b", "10.0.0.9", CPU=2.0),
        node("c", "10.0.0.11"),
        node("d", "10.0.0.1", alive=False),
    ]
    nodes = number_nodes(found, "c")
    assert [(n.number, n.id, n.cpus, n.gpus) for n in nodes] == [(0, "c", 0, 0), (1, "b", 2, 0), (2, "a", 4, 1)]
    assert number_nodes(reversed(found), "c") == nodes


def test_nodes_on_one_machine_have_an_order_too() -> None:
    found = [node("y", "10.0.0.1"), node("x", "10.0.0.1"), node("z", "host")]
    assert [n.id for n in number_nodes(found, "z")] == ["z", "x", "y"]


def test_who_runs_where() -> None:
    nodes = number_nodes([node("x", "10.0.0.1"), node("y", "10.0.0.2")], "x")
    ranks = [RankPlan(Role.CONSUMER, rank, "cuda:0", 4, node=int(rank == 3)) for rank in range(5)]
    assert who_runs_where([RankPlan(Role.READER, 0, "cpu", 1), *ranks], nodes) == [
        PlaceRow(0, "10.0.0.1", "consumer", "0-2, 4", "cuda:0", 4),
        PlaceRow(0, "10.0.0.1", "reader", "0", "cpu", 1),
        PlaceRow(1, "10.0.0.2", "consumer", "3", "cuda:0", 4),
    ]


def test_the_interface_of_an_address() -> None:
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("127.0.0.5") == "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))  # sends nothing: it asks the kernel for a route
        except OSError:
            pytest.skip("this machine has no route, so no address of its own")
        own = probe.getsockname()[0]
    assert interface_of(own) in [name for _, name in socket.if_nameindex()]
    with pytest.raises(PlanError, match=r"203.0.113.77 and none of its interfaces"):
        interface_of("203.0.113.77")


def test_a_node_without_a_file_or_with_another_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "rows", tmp_path / "folder"
    file.write_bytes(b"12345")
    folder.mkdir()
    paths = [str(file), str(folder), str(tmp_path / "none")]
    here = look(paths)
    check_seen(1, "10.0.0.2", here, here)
    file.write_bytes(b"123")
    with pytest.raises(PlanError, match=r"node 1 \(10.0.0.2\) has another .*rows \(3 bytes\) than .* \(5 bytes\)"):
        check_seen(1, "10.0.0.2", look(paths), here)
    file.unlink()
    with pytest.raises(PlanError, match=r"node 1 \(10.0.0.2\) does not have .*rows") as error:
        check_seen(1, "10.0.0.2", look(paths), here)
    assert error.value.exit_code == 4
