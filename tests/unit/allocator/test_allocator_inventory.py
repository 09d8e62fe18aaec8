"""The inventory of machines laid out as folders: limits of control groups, of both versions, bind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowtrain.allocator import local_inventory
from flowtrain.allocator.gpus import visible

MEMINFO = "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_machine() -> None:
    inventory = local_inventory()
    assert 1 <= inventory.cpus <= (os.cpu_count() or 1)
    assert inventory.memory_bytes > 0


def test_without_control_groups(tmp_path: Path) -> None:
    inventory = local_inventory(lay_out(tmp_path, {"proc/meminfo": MEMINFO}))
    assert inventory.memory_bytes == 3000 * 1024
    assert inventory.cpus == len(os.sched_getaffinity(0))
    assert inventory.shm_bytes == 0


def test_limits_of_an_outer_group_bind(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{group}/outer/memory.max": "1000000\n",
        f"{group}/outer/memory.current": "600000\n",
        f"{group}/outer/memory.stat": "anon 1\ninactive_file 100000\n",
        f"{group}/outer/cpu.max": "100000 100000\n",
        f"{group}/outer/inner/memory.max": "max\n",
        f"{group}/outer/inner/memory.current": "1\n",
        f"{group}/outer/inner/cpu.max": "max 100000\n",
    }
    inventory = local_inventory(lay_out(tmp_path, files))
    assert inventory.memory_bytes == 500000
    assert inventory.cpus == 1


def test_first_version_of_control_groups(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n",
        f"{group}/memory.limit_in_bytes": "800000\n",
        f"{group}/memory.usage_in_bytes": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    inventory = local_inventory(lay_out(tmp_path, files))
    assert (inventory.memory_bytes, inventory.cpus) == (500000, 1)


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "10\n",
        "sys/fs/cgroup/memory.current": "20\n",
    }
    assert local_inventory(lay_out(tmp_path, files)).memory_bytes == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, ["GPU-aa1", "GPU-ab2", "GPU-ac3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-ac3", "GPU-aa1"]),
        ("0,3,1", ["GPU-aa1"]),
        (" GPU-ab , 0", ["GPU-ab2", "GPU-aa1"]),
        ("GPU-a,0", []),
        ("MIG-7,MIG-8", ["MIG-7", "MIG-8"]),
    ],
)
def test_gpus_are_those_that_cuda_would_show(text: str | None, shown: list[str]) -> None:
    assert visible(text, ["GPU-aa1", "GPU-ab2", "GPU-ac3"]) == shown
