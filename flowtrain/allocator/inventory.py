"""What this machine has for a run: cores, GPUs and memory that the process may use, not what the board carries.

| figure | smallest of |
|---|---|
| cores | affinity mask; CPU quota of each control group above the process |
| memory | `MemAvailable`; limit minus use of each control group above the process (its file cache counts as free) |
| GPUs | what NVML lists; `CUDA_VISIBLE_DEVICES` (`gpus.py`) |
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowtrain.allocator.gpus import Gpu, local_gpus


@dataclass(frozen=True, slots=True)
class Inventory:
    """Usable cores and GPUs, free memory, and free bytes of /dev/shm, of one machine.

    `devices` says what each of the `gpus` is, where that is known; `gpu_reason` why there are none.
    """

    cpus: int
    gpus: int
    memory_bytes: int
    shm_bytes: int
    devices: tuple[Gpu, ...] = ()
    gpu_reason: str | None = None


def local_inventory(root: Path = Path("/")) -> Inventory:
    """Of the machine whose `proc`, `sys` and `dev` lie under `root`."""
    groups = list(_control_groups(root))
    cpus = min([len(os.sched_getaffinity(0)), *(quota for group in groups if (quota := _cpu_quota(group)) is not None)])
    memory = [_available_bytes(root), *(free for group in groups if (free := _group_free_bytes(group)) is not None)]
    devices, reason = local_gpus()
    shm_bytes = _shm_bytes(root / "dev/shm")
    return Inventory(max(1, cpus), len(devices), max(0, min(memory)), shm_bytes, devices, reason)


def cpu_name(root: Path = Path("/")) -> str:
    """This machine's processor as its maker calls it."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that bound this process, innermost first."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif {"memory", "cpu"} & set(controllers.split(",")):
            top = mount / controllers
        else:
            continue
        folder = top / path.lstrip("/")
        yield from (at for at in (folder, *folder.parents) if at == top or top in at.parents)


def _cpu_quota(group: Path) -> int | None:
    """Whole cores of a control group, None where it sets no bound."""
    fields = _text(group / "cpu.max").split()
    quota, period = fields if len(fields) == 2 else (_text(group / name) for name in _CPU_V1)
    if not quota.strip().isdigit() or not period.strip().isdigit():
        return None
    return max(1, int(quota) // int(period))


_CPU_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def _group_free_bytes(group: Path) -> int | None:
    """Bytes a control group may still take, None where it sets no bound."""
    for limit_name, use_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, use = _text(group / limit_name).strip(), _text(group / use_name).strip()
        if limit.isdigit() and use.isdigit():
            stat = dict(line.split(None, 1) for line in _text(group / "memory.stat").splitlines())
            return int(limit) - int(use) + int(stat.get(cache_key, "0"))
    return None


def _available_bytes(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shm_bytes(folder: Path) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _text(file: Path) -> str:
    """Content of a small file, empty where there is none: systems differ in what they show."""
    try:
        return file.read_text()
    except OSError:
        return ""
