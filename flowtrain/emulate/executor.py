"""Processes that stand for devices: some for each side, one for the readers, kept for any number of runs.

Neighbours share a process: peers of a data-parallel rank have neighbouring numbers. Those that work together meet over
processes (`meeting`). Colocated, a rank's two sides are in one process and have one thread, as they have one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.config.schema import ClusterConfig
from flowtrain.emulate.slot import make_slot
from flowtrain.plan import Layout, Plan, RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.shared_executor import Rank, SharedExecutor
from flowtrain.types import Role

START_SECONDS = 120.0


@dataclass(slots=True)
class Places:
    """Where the ranks of the present run are. `processes`: of each side, at most."""

    processes: int
    layouts: Mapping[Role, Layout] = field(default_factory=dict)
    colocated: bool = False

    def take(self, plan: Plan) -> None:
        """Those of this plan from here on."""
        self.layouts = {Role.PRODUCER: plan.producers.layout, Role.CONSUMER: plan.consumers.layout}
        self.colocated = plan.placement == "colocated"

    def __call__(self, key: Rank) -> tuple[Rank, Rank]:
        """Process and lane."""
        role, rank = key
        if role is Role.READER:
            return (role, 0), key
        world = self.layouts[Role.CONSUMER if self.colocated else role].world_size
        process = (rank * self.processes // world if world > self.processes else rank) % self.processes
        if self.colocated:
            return (Role.PRODUCER, process), (Role.PRODUCER, rank)
        return (role, process), key


class EmulatedExecutor(SharedExecutor):
    """`take` the plan of a run before it starts."""

    def __init__(self, cluster: Cluster, processes: int) -> None:
        self.places = Places(processes)
        super().__init__(cluster, START_SECONDS, self.places, make_slot)

    def take(self, plan: Plan) -> None:
        self.places.take(plan)


def own_cluster(config: ClusterConfig | None = None) -> Cluster:
    """A local node; leave it as a context. Devices ask for no cores of it."""
    cluster = Cluster(config or ClusterConfig())
    cluster.start([RankPlan(Role.READER, 0, "cpu", 1)])
    return cluster
