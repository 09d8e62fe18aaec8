"""Page-locks a segment where this process uses a GPU, so that copies to it run at full speed and asynchronously.

One registration for each segment, never one for each tensor: the driver allows few, and refuses very large ones. A
refusal costs speed only: the segment stays pageable, with one warning, and is missing in `PoolClient.pinned_bytes`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

MAX_REGISTRATION_BYTES = 256 * 2**30
"""Drivers refuse a single registration of 512 GiB; a copy may not cross from one registration into the next."""

_PORTABLE = 1
_ALREADY_REGISTERED = 712


def pin(memory: memoryview) -> int | None:
    """Lock the pages of `memory`; returns what `unpin` takes, or None when nothing was locked.

    A process that has not touched a GPU locks nothing: that would make a device context in every CPU process of a GPU
    node.
    """
    if not memory.nbytes or not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    if memory.nbytes > MAX_REGISTRATION_BYTES:
        _warn(memory.nbytes, f"larger than {MAX_REGISTRATION_BYTES} bytes")
        return None
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    result = int(_cudart().cudaHostRegister(start, memory.nbytes, _PORTABLE))
    if result == 0:
        return start
    if result != _ALREADY_REGISTERED:
        _warn(memory.nbytes, f"CUDA error {result}; is `ulimit -l` too low?")
    return None


def unpin(start: int) -> None:
    _cudart().cudaHostUnregister(start)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _warn(num_bytes: int, why: str) -> None:
    warnings.warn(
        f"a pool segment of {num_bytes} bytes stays pageable ({why}): copies to the GPU are slower",
        RuntimeWarning,
        stacklevel=3,
    )
