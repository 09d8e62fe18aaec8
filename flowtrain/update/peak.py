"""The most memory that this process has held: of its accelerator where it uses one, else resident in the host."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes() -> int:
    """Bytes at the highest point since the process started."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
