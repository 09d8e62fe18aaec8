"""Which process of each node is asked for the node's devices, how often, and what its answers say in the record.

One rank a node has the sampling thread; the question is an order like any other, answered between two others, and never
waited for. A node that can have no figures is asked until it has said so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flowtrain.plan import Plan
from flowtrain.runtime.start import all_ranks
from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.nvml import OK, STARTING, DeviceSample, NodeDevices
from flowtrain.telemetry.registry import Metric
from flowtrain.types import Role

ORDER = (Role.CONSUMER, Role.READER, Role.PRODUCER)
"""Who is asked first: a consumer stays to the end; producers may be ended by a change of the plan."""

FIGURES: dict[Metric, str] = {
    m.DEVICE_THROTTLE: "throttle",
    m.DEVICE_UTILIZATION: "utilization_percent",
    m.DEVICE_MEMORY: "memory_used_gib",
    m.DEVICE_POWER: "power_watts",
    m.DEVICE_TEMPERATURE: "temperature_celsius",
    m.DEVICE_PCIE: "pcie",
    m.DEVICE_NVLINK: "nvlink",
    m.DEVICE_THROTTLED: "throttled",
}


class DeviceWatch:
    """`seconds`: between two questions, 0 for none. `clock`: seconds that only go up."""

    def __init__(self, plan: Plan, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._askers: dict[tuple[Role, int], int] = {}
        self._newest: dict[int, NodeDevices] = {}
        self._told: dict[str, str] = {}
        self._next = clock()
        self._asked: set[tuple[Role, int]] = set()
        ranks = sorted(all_ranks(plan), key=lambda rank: (ORDER.index(rank.role), rank.rank))
        self._gpu_nodes = {rank.node for rank in ranks if rank.on_gpu}
        removable = {(spare.role, spare.rank) for spare in plan.spare}
        for rank in ranks if seconds else ():
            may_go = bool(plan.spare) and rank.role is Role.PRODUCER and rank.rank > 0
            if rank.node not in self._askers.values() and not may_go and (rank.role, rank.rank) not in removable:
                self._askers[rank.role, rank.rank] = rank.node

    def due(self) -> dict[tuple[Role, int], tuple[Any, ...]]:
        """The calls to make now: each node's once every `seconds`, and none while one is not answered."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + self._seconds
        calls = {
            key: ("devices", self._seconds)
            for key, node in self._askers.items()
            if key not in self._asked and not (node in self._newest and self._newest[node].final)
        }
        self._asked |= calls.keys()
        return calls

    def answered(self, role: Role, rank: int, found: NodeDevices) -> list[str]:
        """Takes an answer; returns what is new to be said of it, once for each state of a device the run uses."""
        node = self._askers[role, rank]
        self._asked.discard((role, rank))
        self._newest[node] = found
        if node not in self._gpu_nodes:
            return []
        news = []
        for name, sample in _named(node, found).items():
            before, self._told[name] = self._told.get(name, OK), sample.state
            if sample.state not in (before, STARTING):
                news.append(f"devices: {name} {'has all figures again' if sample.state == OK else sample.state}")
        return news

    def measured(self) -> dict[Metric, Any]:
        """The newest of every node, by the name of its devices; empty where none was asked."""
        samples = {name: it for node, found in sorted(self._newest.items()) for name, it in _named(node, found).items()}
        if not samples:
            return {}
        return {m.DEVICE_STATE: {name: sample.state for name, sample in samples.items()}} | {
            metric: {name: getattr(sample, part) for name, sample in samples.items()}
            for metric, part in FIGURES.items()
        }


def _named(node: int, found: NodeDevices) -> dict[str, DeviceSample]:
    """`n0g1` for a device; `n0` stands for a node without one, and has its state."""
    if not found.devices:
        return {f"n{node}": DeviceSample(found.state)}
    return {f"n{node}g{index}": sample for index, sample in sorted(found.devices.items())}
