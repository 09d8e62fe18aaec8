"""Builds the plan from a config, after `decide` has set what the policy chooses (pure, contract C10).

1. Number of processes: `num` or `layout`, else one.
2. Devices: what `device` says; `auto` takes GPUs for the consumers first (the backbone is the dearer part), then for
   the producers, a whole side or none of it.
3. Threads: what `threads` says; the cores left are divided evenly among the processes that say nothing.
4. Nodes: `node` of a side, else the driver's first (`place.py`).
5. Pool: `pool.bytes` of each node divided among the owners on it (`segments.py`).
6. Refused, with both numbers: more threads than cores where that is not allowed, more GPUs or memory than there are, a
   pool that cannot hold a full pack for each rank, a process that its device cannot hold (`fit.py`).

Readers are not counted among the processes on cores: they tokenise in the gaps of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowtrain.allocator.bound import given_layout, given_threads
from flowtrain.allocator.decide import decide
from flowtrain.allocator.fit import check_device_memory
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.layout import check_layout
from flowtrain.allocator.place import Homes, Need, NodeRoom, place
from flowtrain.allocator.profile import Profile
from flowtrain.allocator.room import check_pool
from flowtrain.allocator.segments import divide
from flowtrain.allocator.spare import with_spare
from flowtrain.allocator.stats import DataStats
from flowtrain.config.schema import Config, SideConfig
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan, layout_text
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

SHM_BYTES = 96 * 2**20
"""What the object store of a local run takes of /dev/shm, for token ids only; the pool takes none."""

Sizes = Mapping[Role, int]


def make_plan(
    config: Config,
    shape: ModelShape,
    inventory: Inventory,
    nodes: Sequence[NodeRoom] | None = None,
    stats: DataStats | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The plan of a run on this inventory; `nodes`: what the nodes of a joined cluster have, the driver's first.

    `stats`, `profile`: sizes of the rows and what was measured, where they are known and something is open.

    Raises:
        PlanError: it does not fit; the sentence has both numbers and the key to change.
    """
    config = decide(config, shape, inventory, stats, profile, nodes).config
    sides: dict[Role, SideConfig] = {Role.PRODUCER: config.producers, Role.CONSUMER: config.consumers}
    layouts = {role: _layout(config, role, shape) for role in sides}
    sizes = {role: layout.world_size for role, layout in layouts.items()}
    gpus = inventory.gpus if nodes is None else int(sum(node.gpus for node in nodes))
    on_gpu = _devices(config, sides, sizes, inventory, gpus)
    threads = _threads(config, sizes, inventory.cpus)
    homes = _homes(config, sides, layouts, threads, on_gpu, nodes)
    segment_bytes = divide(config, shape, homes, layouts[Role.PRODUCER], layouts[Role.CONSUMER])
    modules = {}
    for role in sides:
        ranks = tuple(
            RankPlan(
                role,
                rank,
                "cuda:0" if on_gpu[role] else "cpu",
                threads[role],
                segment_bytes[role][rank],
                homes[role][rank],
            )
            for rank in range(sizes[role])
        )
        modules[role] = ModulePlan(role, layouts[role], ranks)
    plan = Plan(
        placement=config.placement,
        producers=modules[Role.PRODUCER],
        consumers=modules[Role.CONSUMER],
        readers=config.data.readers,
        cpus=inventory.cpus,
        pool_bytes=sum(sum(of_side) for of_side in segment_bytes.values()),
    )
    _check_replan(config, plan)
    plan = with_spare(config, plan, nodes)
    _check_cores(config, plan)
    _check_memory(config, plan, inventory, nodes)
    check_pool(config, shape, plan)
    check_device_memory(config, shape, plan, inventory, nodes, stats)
    return plan


def plan_warnings(config: Config, plan: Plan, inventory: Inventory) -> list[str]:
    """What runs, and not as well as it could; one line each."""
    found = []
    need = num_threads(plan)
    if config.cluster.address is None and need > plan.cpus and config.cluster.oversubscribe is None:
        found.append(
            f"producers and consumers have {need} threads and this machine has {plan.cpus} cores: they share them "
            f"(cluster.oversubscribe: true silences this, false refuses it)"
        )
    if plan.placement == "colocated" and config.allocation.replan != "off":
        found.append(
            f"allocation.replan is {config.allocation.replan} and a colocated run has no producers of its own that "
            f"could come or go: it does nothing here (allocation.replan: off silences this)"
        )
    if plan.in_driver and config.cluster.address not in (None, "auto"):
        found.append(
            f"one colocated rank is this process itself: cluster.address {config.cluster.address} is not joined "
            f"(`http://HEAD:8265` would submit it as a job)"
        )
    modules = (("producers", config.producers, plan.producers), ("consumers", config.consumers, plan.consumers))
    for name, side, module in modules:
        if inventory.gpus and side.device == "auto" and module.ranks[0].device == "cpu":
            found.append(
                f"the {name} run on the CPU: not enough of the {inventory.gpus} GPUs are left "
                f"({name}.device: cpu silences this)"
            )
    if plan.placement == "disaggregated" and config.cluster.address is None and inventory.shm_bytes < SHM_BYTES:
        found.append(
            f"/dev/shm has {inventory.shm_bytes} bytes free and token ids take up to {SHM_BYTES}: they go to disk, "
            f"which is slower (enlarge /dev/shm)"
        )
    return found


def num_threads(plan: Plan) -> int:
    """CPU threads of all producers and consumers; colocated, one of each shares a process."""
    of_sides = [sum(rank.threads for rank in side.ranks) for side in (plan.producers, plan.consumers)]
    return max(of_sides) if plan.placement == "colocated" else sum(of_sides)


def _layout(config: Config, role: Role, shape: ModelShape) -> Layout:
    layout = given_layout(config, role) or Layout()
    check_layout(layout, role, shape, f"{role}s.layout")
    return layout


def _devices(
    config: Config, sides: Mapping[Role, SideConfig], sizes: Sizes, inventory: Inventory, gpus: int
) -> dict[Role, bool]:
    """Whether each side runs on GPUs, one a process; `gpus`: of all nodes, where they are known."""
    chosen = {role: side.device == "cuda" for role, side in sides.items()}
    wanted = {role: side.device != "cpu" for role, side in sides.items()}
    if config.placement == "colocated":
        need = max(sizes.values())
        if any(chosen.values()) and inventory.gpus < need:
            raise PlanError(
                f"producers.device or consumers.device is cuda for {need} processes and this machine has "
                f"{inventory.gpus} GPUs{_why(inventory)}: set it to cpu, or lower `num`"
            )
        return {role: wanted[role] and inventory.gpus >= need for role in sides}
    needed = sum(sizes[role] for role in sides if chosen[role])
    if config.cluster.address is None and needed > inventory.gpus:
        raise PlanError(
            f"producers.device and consumers.device ask for {needed} GPUs and this machine has {inventory.gpus}"
            f"{_why(inventory)}: lower `num`, or set `device: cpu`"
        )
    left = gpus - needed
    for role in (Role.CONSUMER, Role.PRODUCER):
        if wanted[role] and not chosen[role] and sizes[role] <= left:
            chosen[role] = True
            left -= sizes[role]
    return chosen


def _why(inventory: Inventory) -> str:
    return f" ({inventory.gpu_reason})" if inventory.gpu_reason else ""


def _threads(config: Config, sizes: Sizes, cpus: int) -> dict[Role, int]:
    given = {role: given_threads(config, role, config.placement) for role in sizes}
    if config.placement == "colocated":
        return {role: threads or max(1, cpus // max(sizes.values())) for role, threads in given.items()}
    taken = sum((threads or 0) * sizes[role] for role, threads in given.items())
    num_open = sum(sizes[role] for role, threads in given.items() if threads is None)
    share = max(1, (cpus - taken) // num_open) if num_open else 1
    return {role: threads or share for role, threads in given.items()}


def _homes(
    config: Config,
    sides: Mapping[Role, SideConfig],
    layouts: Mapping[Role, Layout],
    threads: Mapping[Role, int],
    on_gpu: Mapping[Role, bool],
    nodes: Sequence[NodeRoom] | None,
) -> Homes:
    """The node of every rank; consumers have the first choice. Oversubscribed cores are not counted."""
    counted = config.cluster.oversubscribe is not True
    needs = [
        Need(
            role,
            layouts[role].world_size,
            threads[role] if counted else 0,
            int(on_gpu[role]),
            sides[role].node,
            layouts[role].tp,
        )
        for role in (Role.CONSUMER, Role.PRODUCER)
    ]
    return place(needs, nodes)


def _check_replan(config: Config, plan: Plan) -> None:
    layout, most = plan.producers.layout, config.allocation.max_producers
    if config.allocation.replan == "off" or plan.placement == "colocated":
        return
    if most is not None and most < layout.world_size:
        raise PlanError(
            f"allocation.max_producers is {most} and the plan has {layout.world_size} producers: raise it, or lower "
            f"producers.num"
        )
    if layout.world_size > layout.dp_replicate:
        raise PlanError(
            f"allocation.replan is {config.allocation.replan} and producers.layout {layout_text(layout)}: only copies "
            f"of an encoder come and go; set allocation.replan: off, or producers.layout: r{layout.world_size}"
        )


def _check_cores(config: Config, plan: Plan) -> None:
    """On a cluster the cores are the cluster's: Ray is asked once it is there."""
    on_cpu = all(rank.device == "cpu" for side in (plan.producers, plan.consumers) for rank in side.ranks)
    allowed = on_cpu if config.cluster.oversubscribe is None else config.cluster.oversubscribe
    need = num_threads(plan)
    if config.cluster.address is None and need > plan.cpus and not allowed:
        raise PlanError(
            f"{len(plan.producers.ranks)} producers and {len(plan.consumers.ranks)} consumers need {need} cores and "
            f"this machine has {plan.cpus}: lower `num` or `threads`, or set cluster.oversubscribe: true"
        )


def _check_memory(config: Config, plan: Plan, inventory: Inventory, nodes: Sequence[NodeRoom] | None) -> None:
    """`nodes`: Ray's figure is what a node lends in all, not what is free."""
    if config.cluster.address is None and plan.pool_bytes > inventory.memory_bytes:
        raise PlanError(
            f"pool.bytes is {plan.pool_bytes} and this machine has {inventory.memory_bytes} bytes of memory free: "
            f"lower pool.bytes"
        )
    ranks = [rank for side in (plan.producers, plan.consumers) for rank in side.ranks]
    for number, node in enumerate(nodes or ()):
        need = sum(rank.segment_bytes for rank in ranks if rank.node == number)
        if need > node.memory_bytes > 0:
            raise PlanError(
                f"pool.bytes puts {need} bytes on node {node.name}, which lends {node.memory_bytes:.0f} bytes of "
                f"memory: lower pool.bytes, or start Ray there with more (--memory)"
            )
