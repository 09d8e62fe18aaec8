"""The memory model as the search asks for it (`MemoryModel`): bytes of the fullest device of each candidate."""

from __future__ import annotations

from flowtrain.allocator.load import CandidateTable, Floats, ModuleLoad
from flowtrain.allocator.memory import memory_of
from flowtrain.allocator.throughput import Job


def device_bytes(load: ModuleLoad, candidates: CandidateTable, job: Job) -> Floats:
    """Without the device's own context."""
    return memory_of(load, candidates, job).total
