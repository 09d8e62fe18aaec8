"""What the solver knows of a module (`ModuleLoad`) and what it chooses for it (`Candidate`): numbers only (C10).

    config.json ─▶ ModelShape ─┐
    trace, sizes ─▶ DataStats ─┴─loads_of─▶ ModuleLoad ─┬─ memory      bytes of a device   ┐ of a candidate,
                                                        └─ throughput  samples a second    ┘ or of a table of them

FLOPs are those of the forward pass and of a mean sample; `linear_passes` and `attention_passes` say how often training
repeats them:

| module | linear | attention |
|---|---|---|
| frozen, nothing before it trains | 1 | 1 |
| frozen, a gradient flows through it | 2 | 3 |
| trains | 3 | 3 |

A candidate has degrees as in contract C14. Its ranks count from the inside t, c, f, r, p. Weights are sharded over
`shard_degree` = f·c ranks (context parallel ranks hold the same weights, so sharding takes them along).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from flowtrain.plan import Layout
from flowtrain.types import Role

Recompute = Literal["none", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
"""Those that the runtime has: `full` keeps only the input of each layer (`gradient_checkpointing`)."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModuleLoad:
    """One module: its size, and the work of a mean sample.

    Attributes:
        name: `backbone`, or the name of an encoder. A projector is part of the side of the cut where it runs.
        layer_parameters: of all layers together, without experts; `expert_parameters`: of all experts of all layers.
        outer_parameters: embedding, head, projector, positions: what is in no layer.
        trained_parameters: of those three, how many train.
        vocab: columns of the logits; 0 where there is no head.
        experts: of one layer, 0 where it is dense; `top_k` of them see a token; `expert_width` is their inner width.
        expert_layers: layers that have experts.
        tokens: mean a sample (0 without): text and vision tokens of the backbone, patches of an encoder.
        longest_tokens: of the longest sample; a pack must hold it, unless it has one of its own (`own_pack`).
        linear_flops: matrix products of the layers; `attention_flops`: scores and values; `outer_flops`: outside of
            the layers (patch embedding, projector, head).
        share: of the samples, how many use the module.
        spread: standard deviation of a sample's work over its mean, for an encoder.
        pool_bytes: mean a sample that crosses the pool, written (encoder) or read (backbone).
        gradient_returns: the pool carries the same bytes back.
        head_norms: queries and keys of a head are normed.
        head_tokens: mean a sample, those that the head runs for.
        replayed: its forward runs again as a whole before its backward (`producers.backward: recompute`).
    """

    name: str
    role: Role
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    gated: bool
    vocab: int
    layer_parameters: int
    outer_parameters: int
    trained_parameters: int
    tokens: float
    longest_tokens: int
    linear_flops: float
    attention_flops: float
    outer_flops: float
    linear_passes: int
    attention_passes: int
    share: float = 1.0
    spread: float = 0.0
    pool_bytes: float = 0.0
    gradient_returns: bool = False
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    expert_layers: int = 0
    expert_parameters: int = 0
    head_norms: bool = False
    head_tokens: float = 0.0
    replayed: bool = False
    own_pack: bool = False

    def __post_init__(self) -> None:
        assert min(self.layers, self.hidden, self.heads, self.kv_heads, self.linear_passes) > 0, self
        assert min(self.tokens, self.linear_flops, self.attention_flops, self.outer_flops, self.pool_bytes) >= 0, self
        assert 0 <= self.trained_parameters <= self.parameters, self

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.expert_parameters + self.outer_parameters

    @property
    def trains(self) -> bool:
        return self.trained_parameters > 0

    @property
    def needs_backward(self) -> bool:
        """A gradient is made in it or flows through it: activations are kept."""
        return self.linear_passes > 1

    @property
    def train_flops(self) -> float:
        """Forward and backward of a mean sample."""
        linear = self.linear_passes * (self.linear_flops + self.outer_flops)
        return linear + self.attention_passes * self.attention_flops


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a module. `CandidateTable` has the same names as columns: formulas take either.

    Attributes:
        vpp: layer groups of a device under interleaved 1F1B; 1 is plain 1F1B.
        pack_tokens: most tokens of a pack (patches of an encode unit).
        recompute: index into `RECOMPUTE`.
        threads: cores of a process on a CPU; 1 elsewhere.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    pack_tokens: int = 8192
    recompute: int = 0
    threads: int = 1

    @property
    def replicas(self) -> int:
        """Data-parallel copies: each works on packs of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_degree(self) -> int:
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def devices(self) -> int:
        """What is taken of the inventory: devices, or cores on a CPU."""
        return self.world_size * self.threads

    @property
    def layout(self) -> Layout:
        return Layout(self.dp_replicate, self.dp_shard, self.tp, self.cp, self.pp, self.ep, self.vpp)

    @property
    def schedule(self) -> str:
        if self.pp == 1:
            return "none"
        return "1f1b" if self.vpp == 1 else f"interleaved-{self.vpp}"


COLUMNS = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "vpp", "ep", "pack_tokens", "recompute", "threads")


@dataclass(frozen=True, slots=True, eq=False)
class CandidateTable:
    """Many candidates, a column a degree; columns are of one length, or of one row where all candidates agree."""

    dp_replicate: Integers
    dp_shard: Integers
    tp: Integers
    cp: Integers
    pp: Integers
    vpp: Integers
    ep: Integers
    pack_tokens: Integers
    recompute: Integers
    threads: Integers

    def __len__(self) -> int:
        return max(len(getattr(self, name)) for name in COLUMNS)

    def __getitem__(self, row: int) -> Candidate:
        return Candidate(*(int(column[row if len(column) > 1 else 0]) for column in self.columns()))

    def columns(self) -> list[Integers]:
        return [getattr(self, name) for name in COLUMNS]

    def take(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> CandidateTable:
        """These rows; every column is written out."""
        num = len(self)
        return CandidateTable(*(np.broadcast_to(column, num)[rows] for column in self.columns()))

    @classmethod
    def join(cls, tables: Sequence[CandidateTable]) -> CandidateTable:
        columns = zip(*(table.columns() for table in tables), strict=True)
        return cls(*(np.concatenate(column) for column in columns)) if tables else cls.of([])

    @property
    def replicas(self) -> Integers:
        return self.dp_replicate * self.dp_shard

    @property
    def shard_degree(self) -> Integers:
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> Integers:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def devices(self) -> Integers:
        return self.world_size * self.threads

    @classmethod
    def of(cls, candidates: list[Candidate]) -> CandidateTable:
        rows = [[getattr(candidate, name) for name in COLUMNS] for candidate in candidates]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T
        return cls(*(column.copy() for column in columns))
