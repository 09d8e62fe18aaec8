"""Page-locks a segment where this process uses a GPU, so that copies to it run at full speed and asynchronously.

One registration for each segment, never one for each tensor: the driver allows few, and refuses very large ones. A
refusal costs speed only: the segment stays pageable, with one warning, and is missing in `PoolClient.pinned_bytes`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

import torch

MAX_REGISTRATION_BYTES = 256 * 2**30
"""Drivers refuse a single registration of 512 GiB; a copy may not cross from one registration into the next."""

_PORTABLE = 1

_holders: Counter[int] = Counter()
"""How often each locked address was asked for: in one process a producer and a consumer share a segment."""


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
    if not _holders[start]:
        result = int(_cudart().cudaHostRegister(start, memory.nbytes, _PORTABLE))
        if result:
            _forget_refusal()
            _warn(memory.nbytes, f"CUDA error {result}; is `ulimit -l` too low?")
            return None
    _holders[start] += 1
    return start


def unpin(start: int) -> None:
    """End one hold on a locked segment; the last one unlocks it."""
    _holders[start] -= 1
    if not _holders[start]:
        del _holders[start]
        _cudart().cudaHostUnregister(start)


def _forget_refusal() -> None:
    """The driver keeps a refusal as its last error, which the next kernel would report: let a tiny one do so."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _warn(num_bytes: int, why: str) -> None:
    warnings.warn(
        f"a pool segment of {num_bytes} bytes stays pageable ({why}): copies to the GPU are slower",
        RuntimeWarning,
        stacklevel=3,
    )
