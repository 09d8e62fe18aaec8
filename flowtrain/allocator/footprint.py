"""Bytes of the fullest device of each candidate, in the form that the search asks for (`MemoryModel`)."""

from __future__ import annotations

from flowtrain.allocator.load import CandidateTable, Floats, ModuleLoad
from flowtrain.allocator.memory import memory_of
from flowtrain.allocator.throughput import Job


def device_bytes(load: ModuleLoad, c: CandidateTable, job: Job) -> Floats:
    """The total of `flowtrain.allocator.memory`, without the device's context."""
    return memory_of(load, c, job).total
