"""Page-locks a segment where this process uses a GPU, so that copies to it run at full speed and asynchronously.

    segment │ chunk of FENCE_BYTES │ chunk of FENCE_BYTES │ rest │     one registration each, never one for each tensor

The driver allows few registrations, refuses very large ones, and no copy may cross from one into the next: chunks end
where the arena has its fences, and no block lies across a fence. A refusal costs speed only: what is not locked stays
pageable, with one warning, and is missing in `pool/pinned_bytes`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

from flowtrain.pool.arena import FENCE_BYTES

_PORTABLE = 1

_holders: Counter[int] = Counter()
"""How often each locked address was asked for: in one process a producer and a consumer share a segment."""


class Pinned(NamedTuple):
    """Addresses of the registrations of one segment, and their bytes."""

    starts: tuple[int, ...] = ()
    bytes: int = 0


def pin(memory: memoryview, chunk_bytes: int = FENCE_BYTES) -> Pinned:
    """Lock the pages of `memory`, as much of it as the driver allows; give what it returns to `unpin`.

    A process that has not touched a GPU locks nothing: that would make a device context in every CPU process of a GPU
    node. One without torch has not.
    """
    torch = sys.modules.get("torch")
    if not memory.nbytes or torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return Pinned()
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    starts: list[int] = []
    for offset in range(0, memory.nbytes, chunk_bytes):
        num_bytes = min(chunk_bytes, memory.nbytes - offset)
        if not _holders[start + offset]:
            result = int(_cudart().cudaHostRegister(start + offset, num_bytes, _PORTABLE))
            if result:
                _forget_refusal()
                _warn(memory.nbytes - offset, memory.nbytes, result)
                return Pinned(tuple(starts), offset)
        _holders[start + offset] += 1
        starts.append(start + offset)
    return Pinned(tuple(starts), memory.nbytes)


def unpin(pinned: Pinned) -> None:
    """End one hold on a locked segment; the last one unlocks it."""
    for start in pinned.starts:
        _holders[start] -= 1
        if not _holders[start]:
            del _holders[start]
            _cudart().cudaHostUnregister(start)


def _forget_refusal() -> None:
    """The driver keeps a refusal as its last error, which the next kernel would report: let a tiny one do so."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _warn(num_bytes: int, segment_bytes: int, error: int) -> None:
    warnings.warn(
        f"{num_bytes} of {segment_bytes} bytes of a pool segment stay pageable (CUDA error {error}; is `ulimit -l` too "
        f"low?): copies to the GPU are slower",
        RuntimeWarning,
        stacklevel=3,
    )
