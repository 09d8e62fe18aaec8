"""Room of a plan in a running cluster, taken at once or not at all: one bundle of a placement group for each node.

Two runs that start together cannot each hold half of what the other needs. The plan has chosen the nodes, so a bundle
names its node; a process without cores or GPUs of its own (oversubscribed, or a reader) is placed beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ray._private.state import available_resources_per_node  # the public call sums over nodes
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from flowtrain.errors import PlanError
from flowtrain.plan import RankPlan
from flowtrain.runtime.nodes import Node
from flowtrain.telemetry.streams import tell

TELL_SECONDS = 5.0
"""A wait for room is told after so long."""

NODE_ID = "ray.io/node-id"
"""The label by which Ray names a node to a bundle."""


class Reservation:
    """Holds the room of `ranks` until `close`; `cpus_of`: what a process asks of Ray.

    Raises:
        PlanError: it was not free within `timeout_seconds`; the sentence has what was asked and what is free.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        ranks: Sequence[RankPlan],
        cpus_of: Callable[[RankPlan], int],
        timeout_seconds: float,
    ) -> None:
        self.nodes = nodes
        self._bundles: dict[int, int] = {}
        self._group: PlacementGroup | None = None
        needs: dict[int, dict[str, float]] = {}
        for plan in ranks:
            need = needs.setdefault(plan.node, {"CPU": 0.0, "GPU": 0.0})
            need["CPU"] += cpus_of(plan)
            need["GPU"] += plan.on_gpu
        bundles: list[dict[str, float]] = []
        for number, need in sorted(needs.items()):
            if asked := {name: amount for name, amount in need.items() if amount}:
                self._bundles[number] = len(bundles)
                bundles.append(asked)
        if bundles:
            labels = [{NODE_ID: nodes[number].id} for number in self._bundles]
            self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
            try:
                self._wait(dict(zip(self._bundles, bundles, strict=True)), timeout_seconds)
            except BaseException:
                self.close()
                raise

    def _wait(self, asked: dict[int, dict[str, float]], timeout_seconds: float) -> None:
        assert self._group is not None
        deadline = time.monotonic() + timeout_seconds
        if self._group.wait(min(TELL_SECONDS, timeout_seconds)):
            return
        tell(f"waiting for room on the cluster: {self._told(asked)}")
        while time.monotonic() < deadline:  # in short waits, so that a signal is heard
            if self._group.wait(min(1.0, max(deadline - time.monotonic(), 0.01))):
                return
        raise PlanError(
            f"the cluster had no room within {timeout_seconds:g} s: {self._told(asked)}: end other runs (`flowtrain "
            f"jobs list`), lower `num` or `threads`, or raise cluster.start_timeout_seconds"
        )

    def _told(self, asked: dict[int, dict[str, float]]) -> str:
        """What was asked and what each node has, in words."""
        free = available_resources_per_node()
        wanted = "; ".join(
            f"{_amounts(need)} on node {number} ({self.nodes[number].address})" for number, need in asked.items()
        )
        available = ", ".join(
            f"node {node.number} ({node.address}) {free.get(node.id, {}).get('CPU', 0.0):g} of {node.cpus:g} CPUs"
            + (f" and {free.get(node.id, {}).get('GPU', 0.0):g} of {node.gpus:g} GPUs" if node.gpus else "")
            for node in self.nodes
        )
        return f"asked for {wanted}; available per node: {available}"

    def place_of(self, plan: RankPlan) -> Any:
        """Ray's scheduling strategy for a process."""
        if plan.node in self._bundles:
            return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[plan.node])
        return NodeAffinitySchedulingStrategy(self.nodes[plan.node].id, soft=False)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _amounts(need: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}s" for name, amount in need.items())
