"""What both sides may be placed on, of one kind: this machine's GPUs or cores, or those of a joined cluster (pure).

Nodes of a cluster that differ count as the smallest of those that are used: of all sizes the one that gives most
devices, so that a head node without cores, or a small one, is left out. None where there is no such one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowtrain.allocator.hardware import HARDWARE, Cluster, NodePool, node_type
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.place import NodeRoom
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError

PCIE_BANDWIDTH = 32e9
"""Of 16 lanes of version 4, a direction."""


def devices_of(config: Config, inventory: Inventory, nodes: Sequence[NodeRoom] | None) -> Cluster | None:
    """`nodes`: of a joined cluster; without them a config that names a cluster has nothing yet to be placed on."""
    if nodes is not None:
        return _of_nodes(config, nodes)
    return None if config.cluster.address is not None else _here(config, inventory)


def _here(config: Config, inventory: Inventory) -> Cluster | None:
    devices = {side.device for side in (config.producers, config.consumers)}
    if inventory.gpus and devices <= {"auto", "cuda"}:
        names = {gpu.name for gpu in inventory.devices}
        if inventory.gpus < 2 or len(names) != 1:
            return None
        try:
            node = node_type(*names)
        except PlanError:
            return None
        memory = float(min(gpu.memory_bytes for gpu in inventory.devices))
        # Without direct links GPUs talk over PCIe, whatever the table says of their kind.
        linked = all(gpu.links for gpu in inventory.devices)
        link = node.link_bandwidth if linked else min(node.link_bandwidth, PCIE_BANDWIDTH)
        node = replace(node, devices=inventory.gpus, memory_bytes=memory, link_bandwidth=link)
        return (NodePool(node, 1),) if config.model.dtype in node.peak_flops else None
    if inventory.gpus and devices != {"cpu"}:
        return None
    return _cores(max(1, inventory.cpus), inventory.memory_bytes, 1)


def _of_nodes(config: Config, nodes: Sequence[NodeRoom]) -> Cluster | None:
    devices = {side.device for side in (config.producers, config.consumers)}
    if any(node.gpus for node in nodes) and devices != {"cpu"}:
        kinds = {node.gpu for node in nodes if node.gpus}
        size, used = _most([int(node.gpus) for node in nodes])
        if "cpu" in devices or size * used < 2 or len(kinds) != 1:
            return None
        try:
            node = replace(node_type(str(*kinds)), devices=size)
        except PlanError:
            return None
        return (NodePool(node, used),) if config.model.dtype in node.peak_flops else None
    size, used = _most([int(node.cpus) for node in nodes])
    if not size:
        return None
    return _cores(size, min(node.memory_bytes for node in nodes if node.cpus >= size), used)


def _most(sizes: Sequence[int]) -> tuple[int, int]:
    """The size, and the number of nodes that have it, which together are most devices."""
    used = {size: sum(other >= size for other in sizes) for size in sizes}
    return max(used.items(), key=lambda one: (one[0] * one[1], one[0]))


def _cores(cores: int, memory_bytes: float, num_nodes: int) -> Cluster:
    return (NodePool(replace(HARDWARE["cpu"], devices=cores, memory_bytes=memory_bytes / cores), num_nodes),)
