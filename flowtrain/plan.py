"""What the allocator decides and the runtime carries out: who runs where, with how many threads and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.types import Role


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism of one module, written `r2f4t2c2p2e2` (contract C14)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process: its device (`cpu`, `cuda:0`), CPU threads, the pool bytes of its own segment (0: none), and the
    number of its node (0: the driver's)."""

    role: Role
    rank: int
    device: str
    threads: int
    segment_bytes: int = 0
    node: int = 0


@dataclass(frozen=True, slots=True)
class ModulePlan:
    role: Role
    layout: Layout
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run. `placement` is `colocated` (one process, no Ray) or `disaggregated`."""

    placement: str
    producers: ModulePlan
    consumers: ModulePlan
    readers: int
    cpus: int
    pool_bytes: int
