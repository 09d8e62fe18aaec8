"""What the allocator decides and the runtime carries out: who runs where, with how many threads and how many bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.types import Role


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism of one module, written `r2f4t2c2p2v2e2`; `vpp`: sections of a pipeline's rank."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def dp_degree(self) -> int:
        """Data-parallel ranks: those that get packs, or units, of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_sections(self) -> int:
        """Runs of neighbouring layers that a pipeline is cut into (`flowtrain.pipeline`)."""
        return self.pp * self.vpp

    @property
    def packs_held(self) -> int:
        """Packs that a data-parallel rank needs at hand to get to the end of the oldest (`flowtrain.pipeline`)."""
        return self.pp if self.vpp == 1 else 2 * self.pp

    def leads(self, rank: int) -> bool:
        """Whether a rank answers for its data-parallel rank: the first of those, who are neighbours in a stage."""
        return self.begins(rank) and rank % (self.tp * self.cp) == 0

    def begins(self, rank: int) -> bool:
        """Whether a rank has the first layers: of a backbone, those who read features."""
        return rank < self.world_size // self.pp

    def neighbours(self, rank: int) -> range:
        """The ranks of one data-parallel rank in one stage of a pipeline, `rank` among them."""
        width = self.tp * self.cp
        first = rank - rank % width
        return range(first, first + width)


LETTERS = {"r": "dp_replicate", "f": "dp_shard", "t": "tp", "c": "cp", "p": "pp", "v": "vpp", "e": "ep"}


def layout_of(text: str) -> Layout:
    """The layout that `text` writes; degrees left out are 1.

    >>> layout_of("r2f4").world_size
    8

    Raises:
        ValueError: it is no layout.
    """
    parts = re.findall(r"([a-z])([1-9]\d*)", text)
    letters = [letter for letter, _ in parts]
    written = "".join(letter + degree for letter, degree in parts)
    if not parts or written != text or len(set(letters)) != len(letters) or not set(letters) <= LETTERS.keys():
        raise ValueError(f"{text!r} is no layout: write degrees after their letters, such as r2 or r2f4")
    return Layout(**{LETTERS[letter]: int(degree) for letter, degree in parts})


def layout_text(layout: Layout) -> str:
    """Degrees above 1; `r1` for a module in one process.

    >>> layout_text(Layout(dp_replicate=2, tp=4)), layout_text(Layout(dp_shard=2)), layout_text(Layout())
    ('r2t4', 'f2', 'r1')
    """
    degrees = [(letter, getattr(layout, name)) for letter, name in LETTERS.items()]
    return "".join(f"{letter}{degree}" for letter, degree in degrees if degree > 1) or "r1"


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

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class ModulePlan:
    role: Role
    layout: Layout
    ranks: tuple[RankPlan, ...]

    @property
    def leading(self) -> tuple[RankPlan, ...]:
        """A rank for each data-parallel rank: the one that answers for it, and owns what it puts into the pool."""
        return tuple(rank for rank in self.ranks if self.layout.leads(rank.rank))

    def copier(self, rank: int) -> int | None:
        """The rank whose copies of what lies on other nodes a consumer sees: the first of its neighbours on its node.
        None for one that makes copies of its own, or needs none."""
        first = first_on_node(self.layout, [other.node for other in self.ranks], rank)
        return first if first != rank and self.ranks[first].segment_bytes else None

    def shares_copies(self, rank: int) -> bool:
        """Whether of a consumer and its neighbours one sees what another has copied."""
        return any(self.copier(other) is not None for other in self.layout.neighbours(rank))


def first_on_node(layout: Layout, nodes: Sequence[int], rank: int) -> int:
    """Of a rank and its neighbours the first on the same node; `nodes`: of every rank of the side."""
    return next(other for other in layout.neighbours(rank) if nodes[other] == nodes[rank])


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run. `placement` is `colocated` (producer and consumer of a rank share a process and its device; a
    single one is the driver itself, without Ray) or `disaggregated`; `spare`: producers that may be added while it goes
    on, in the order in which they come."""

    placement: str
    producers: ModulePlan
    consumers: ModulePlan
    readers: int
    cpus: int
    pool_bytes: int
    spare: tuple[RankPlan, ...] = ()

    @property
    def in_driver(self) -> bool:
        """Whether one colocated rank is all there is: the driver itself."""
        return self.placement == "colocated" and len(self.consumers.ranks) == 1
