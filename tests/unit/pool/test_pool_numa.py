"""NUMA nodes as the kernel tells them, and pages that are put on one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from flowtrain.pool import numa
from flowtrain.pool.private import make_segment
from flowtrain.pool.segment import Segment


def lay_out(root: Path, online: str, cores: dict[int, str]) -> Path:
    folder = root / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text(f"{online}\n")
    for node, text in cores.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}/cpulist").write_text(f"{text}\n")
    return root


def test_nodes_and_the_cores_that_may_be_used(tmp_path: Path) -> None:
    root = lay_out(tmp_path, "0-1,4", {0: "0-31,64-95", 1: "32-63,96-127", 4: ""})
    assert numa.nodes(root) == (0, 1, 4)
    assert numa.nodes_of_cores({3, 64}, root) == (0,)
    assert numa.nodes_of_cores({3, 127}, root) == (0, 1)


def test_a_machine_that_tells_nothing_has_one_node(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == (0,)


@pytest.mark.parametrize("shared", [True, False])
def test_a_segment_lies_where_it_is_wished(shared: bool) -> None:
    if numa.refusal(numa.nodes()[0]):
        pytest.skip(f"pages may not be placed: {numa.refusal(numa.nodes()[0])}")
    node = numa.nodes()[-1]
    segment = make_segment(0, 1 << 20, "auto", node, shared=shared)
    assert f"prefer:{node}" in policy_of(segment.memory)
    if isinstance(segment, Segment):
        reader = Segment.attach(segment.handle())
        assert f"prefer:{node}" in policy_of(reader.memory), "the file keeps the wish"
        reader.close()
    segment.close()


def test_a_node_that_is_not_there_costs_speed_only() -> None:
    with pytest.warns(RuntimeWarning, match="NUMA node 1000"):
        segment = make_segment(0, 1 << 20, "auto", 1000, shared=True)
    segment.memory[:4] = b"bits"
    segment.close()


def policy_of(memory: memoryview) -> str:
    import ctypes

    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lines = Path(f"/proc/{os.getpid()}/numa_maps").read_text().splitlines()
    (line,) = [one for one in lines if int(one.split()[0], 16) == start // mmap.PAGESIZE * mmap.PAGESIZE]
    return line
