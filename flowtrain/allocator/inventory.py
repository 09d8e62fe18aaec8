"""What this machine has for a run: cores, GPUs and memory that the process may use, not what the board carries.

| figure | smallest of |
|---|---|
| cores | affinity mask; CPU quota of each control group above the process |
| memory | `MemAvailable`; limit minus use of each control group above the process (its file cache counts as free) |
| GPUs | what NVML lists; `CUDA_VISIBLE_DEVICES` |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Inventory:
    """Usable cores and GPUs, free memory, and free bytes of /dev/shm, of one machine.

    `gpu_name`, `gpu_memory_bytes`, `gpu_links` are those of the first GPU: links are direct ones (NVLink) to others.
    `gpu_reason` says why there is none to be had.
    """

    cpus: int
    gpus: int
    memory_bytes: int
    shm_bytes: int
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_links: int = 0
    gpu_reason: str | None = None


def local_inventory(root: Path = Path("/")) -> Inventory:
    """Of the machine whose `proc`, `sys` and `dev` lie under `root`."""
    groups = list(_control_groups(root))
    cpus = min([len(os.sched_getaffinity(0)), *(quota for group in groups if (quota := _cpu_quota(group)) is not None)])
    memory = [_available_bytes(root), *(free for group in groups if (free := _group_free_bytes(group)) is not None)]
    gpus = _gpus()
    return Inventory(
        max(1, cpus),
        gpus.count,
        max(0, min(memory)),
        _shm_bytes(root / "dev/shm"),
        gpus.name,
        gpus.memory_bytes,
        gpus.links,
        gpus.reason,
    )


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


@dataclass(frozen=True, slots=True)
class _Gpus:
    count: int = 0
    name: str | None = None
    memory_bytes: int | None = None
    links: int = 0
    reason: str | None = None


def _gpus() -> _Gpus:
    """GPUs that a process started now would see, and what NVML says of the first; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml
    except ImportError:
        return _Gpus(reason="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _Gpus(reason=f"NVML does not start: {error}")
    try:
        there = int(pynvml.nvmlDeviceGetCount())
        shown = there
        if visible is not None:
            names = [name.strip() for name in visible.split(",")]
            shown = min(there, sum(1 for name in names if name and name != "-1"))
        if not shown:
            return _Gpus(reason="CUDA_VISIBLE_DEVICES hides every GPU" if there else "NVML lists no GPU")
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(first)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(first).total)
        return _Gpus(shown, name.decode() if isinstance(name, bytes) else str(name), memory, _links(pynvml, first))
    except pynvml.NVMLError as error:
        return _Gpus(reason=f"NVML does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def _links(pynvml: Any, device: Any) -> int:
    """Direct links of a GPU that are up; 0 where it has none or the driver does not tell."""
    up = 0
    for link in range(int(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            up += int(pynvml.nvmlDeviceGetNvLinkState(device, link))
        except pynvml.NVMLError:
            break
    return up


def _text(file: Path) -> str:
    """Content of a small file, empty where there is none: systems differ in what they show."""
    try:
        return file.read_text()
    except OSError:
        return ""
