"""Whether the processes of a plan fit the memory of their devices, by the memory model (pure).

| device | holds | memory |
|---|---|---|
| GPU | one rank of a side, or one of each where sides are colocated | the least of those there (NVML, hardware table) |
| this machine's cores | all ranks on the CPU, and the pool | what is free |

What a search has found fits by itself; this is for what a config or a plan file has set. Memory that is not known is
not looked at, and where the sizes of rows are not known only what does not depend on them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowtrain.allocator.hardware import HARDWARE, NodePool, node_type
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.load import Candidate, ModuleLoad
from flowtrain.allocator.memory import memory_of
from flowtrain.allocator.options import capacity_bytes
from flowtrain.allocator.place import NodeRoom
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.solve import Problem
from flowtrain.allocator.stats import DataStats
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import ModulePlan, Plan, layout_text
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

GIGA = 1e9
STATES = frozenset({"weights", "copies", "gradients", "moments", "gathered"})
"""Parts that no row makes larger."""


def check_device_memory(
    config: Config,
    shape: ModelShape,
    plan: Plan,
    inventory: Inventory,
    nodes: Sequence[NodeRoom] | None,
    stats: DataStats | None,
) -> None:
    """PlanError, with both numbers, where a device cannot hold what the plan gives it."""
    cpu = HARDWARE["cpu"]
    problem = question_of(config, shape, stats, (NodePool(cpu, 1),)).problem()
    sides = {side.role: side for side in (plan.producers, plan.consumers)}
    needs = dict.fromkeys(sides, 0.0)
    for load in problem.loads:
        candidate = candidate_of(config, sides[load.role], load, problem)
        parts = memory_of(load, candidate, problem.job).parts()
        needs[load.role] += sum(size for name, size in parts.items() if stats is not None or name in STATES)
    colocated = plan.placement == "colocated"
    if (memory := _gpu_bytes(inventory, nodes)) is not None:
        room = capacity_bytes(replace(HARDWARE["h100"], memory_bytes=memory), problem.job)
        on_gpu = [side for side in sides.values() if side.ranks[0].on_gpu]
        for side in on_gpu[:1] if colocated else on_gpu:
            need = sum(needs.values()) if colocated else needs[side.role]
            if need > room:
                raise PlanError(
                    f"{_who(side, colocated)} need {need / GIGA:.3g} GB of a GPU, and {room / GIGA:.3g} GB of it may "
                    f"be taken: {_remedy(side.role, config, colocated)}"
                )
    on_cpu = [side for side in sides.values() if not side.ranks[0].on_gpu]
    if not on_cpu or config.cluster.address is not None:
        return
    processes = max(len(side.ranks) for side in on_cpu) if colocated else sum(len(side.ranks) for side in on_cpu)
    total = sum(len(side.ranks) * needs[side.role] for side in on_cpu) + processes * cpu.context_bytes + plan.pool_bytes
    if total > inventory.memory_bytes:
        raise PlanError(
            f"{processes} processes on the CPU and the pool need {total / GIGA:.3g} GB, and this machine has "
            f"{inventory.memory_bytes / GIGA:.3g} GB free: lower `num`, packing.max_tokens or pool.bytes, or set "
            f"train.gradient_checkpointing: true"
        )


def candidate_of(config: Config, side: ModulePlan, load: ModuleLoad, problem: Problem) -> Candidate:
    """A module as the plan runs it."""
    layout, cores = side.layout, not side.ranks[0].on_gpu
    return Candidate(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        vpp=layout.vpp,
        ep=layout.ep,
        pack_tokens=max(problem.job.sizes(load)),
        recompute=int(bool(config.recompute(load.role)) and load.needs_backward),
        threads=side.ranks[0].threads if cores else 1,
    )


def _gpu_bytes(inventory: Inventory, nodes: Sequence[NodeRoom] | None) -> float | None:
    """Memory of the smallest GPU; None where it is not known of all."""
    if nodes is None:
        return min((float(gpu.memory_bytes) for gpu in inventory.devices), default=None)
    try:
        return min((node_type(str(node.gpu)).memory_bytes for node in nodes if node.gpus), default=None)
    except PlanError:
        return None


def _who(side: ModulePlan, colocated: bool) -> str:
    layout = layout_text(side.layout)
    return f"colocated producers and consumers of layout {layout}" if colocated else f"{side.role}s of layout {layout}"


def _remedy(role: Role, config: Config, colocated: bool) -> str:
    ways = ["lower packing.max_tokens"]
    ways.insert(0, "set allocation.placement: disaggregated" if colocated else f"cut them further ({role}s.layout)")
    if not config.recompute(role):
        ways.insert(1, "set train.gradient_checkpointing: true")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"
