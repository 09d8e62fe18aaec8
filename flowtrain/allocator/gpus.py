"""The GPUs that a process started now would see, as NVML tells them: no device context is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.telemetry.nvml import NO_DEVICE, NOT_INSTALLED, reason

HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"

_MASK_WORDS = 16
"""Of 64 NUMA nodes each."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_bytes`: all of it; `links`: direct ones (NVLink) to other GPUs that are up; `numa_node`: the nearest,
    where the driver tells."""

    name: str
    memory_bytes: int
    links: int = 0
    numa_node: int | None = None


def local_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Those that `CUDA_VISIBLE_DEVICES` leaves, in NVML's order where it names none; and why there are none."""
    try:
        import pynvml
    except ImportError:
        return (), NOT_INSTALLED
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), reason(pynvml, error)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(pynvml.nvmlDeviceGetCount()))]
        identities = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        shown = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), identities)
        if not shown:
            return (), HIDDEN if handles else NO_DEVICE
        return tuple(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(identity)) for identity in shown), None
    except pynvml.NVMLError as error:
        return (), reason(pynvml, error)
    finally:
        pynvml.nvmlShutdown()


def visible(text: str | None, identities: Sequence[str]) -> list[str]:
    """Identities of the devices that `CUDA_VISIBLE_DEVICES` shows: all without it; as CUDA does, none from the first
    name on that is none of them. A name is an index, the start of an identity, or the identity of a part (MIG).

    >>> visible("1,GPU-ab,7,0", ["GPU-abc", "GPU-def"])
    ['GPU-def', 'GPU-abc']
    """
    if text is None:
        return list(identities)
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if name.isdigit():
            matching = identities[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            matching = [name]
        else:
            matching = [identity for identity in identities if name and identity.startswith(name)]
        if len(matching) != 1:
            break
        found += matching
    return found


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(
        _text(pynvml.nvmlDeviceGetName(handle)), memory_bytes, _links(pynvml, handle), _numa_node(pynvml, handle)
    )


def _links(pynvml: Any, handle: Any) -> int:
    """0 where the device has none or the driver does not tell."""
    up = 0
    for link in range(int(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            up += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return up


def _numa_node(pynvml: Any, handle: Any) -> int | None:
    try:
        mask = pynvml.nvmlDeviceGetMemoryAffinity(handle, _MASK_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    except pynvml.NVMLError:
        return None
    near = [64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if int(bits) >> bit & 1]
    return near[0] if near else None


def _text(value: bytes | str) -> str:
    """Older releases of NVML's bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
