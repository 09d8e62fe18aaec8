"""Bytes of the fullest device of a candidate, by part (pure; formulas over one candidate or a table of them).

Per device, with P parameters and P' trained ones of its stage, n bytes of a number in the compute dtype, N = max(4, n),
s = f·c ranks that share weights, rows = tokens of a pack / (tp · cp):

| part | bytes |
|---|---|
| weights | N · P / (tp · s): parameters are fp32, or float64 |
| copies | n · P / tp where s = 1 and n < 4: autocast keeps what it has cast until the pack is done |
| gradients, moments | N · P' / (tp · s), twice that |
| gathered | where s > 1: n · (two layers and the stage's outer part) / tp, and the gradient of one layer |
| activations | packs in flight · layers of the stage · rows · bytes that a layer keeps; of frozen modules none |
| working | one layer's activations: what recompute brings back, or gradients of activations |
| logits | (2 N + n if n < 4) · vocabulary · trained rows, on the last stage; of one chunk of a loss in chunks (2) |
| staging | features (of the pack in use and of the next one) that crossed the pool or will |

A layer keeps, of each row (h hidden; q queries, k keys of all heads; f width inside the MLP, of experts top_k times):

| tensor | bytes | frozen, on the gradient path |
|---|---|---|
| inputs of both norms | 2 h N | 2 h N |
| what norms without a bias make | 2 h N | – |
| inputs of the matrices behind the norms | 2 h n, or 5 h n (1) | – |
| queries, keys, values, output | (2 q + 2 k) n | (2 q + 2 k) n |
| output joined over samples; encoder: before rotation | q n; 3 q n | q n; 3 q n |
| queries and keys around head norms | (q + k) (N + n) | (q + k) N |
| gate, its activation, up; without a gate: one of them | 3 f n; f n | 3 f n; f n |
| input of the last matrix | f n | – |

(1) where n < 4 each matrix casts its own copy: q, k and v, gate and up.
(2) the mean share of a full pack's tokens, and no more than `Job.max_trained_tokens`: the head runs for no others.

`full` keeps h N. A trainable encoder has min(packs, 3) units in flight, or one where its forward is replayed. 1F1B has
min(packs, pp) packs in flight on the first stage, one on the last; interleaved, with m layer groups a device,
pp + (pp - 1) / m; one of them is the longest row where that has a pack of its own. Embedding and head are on the first
and the last stage, a tied one on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from flowtrain.allocator.load import Candidate, CandidateTable, Floats, ModuleLoad
from flowtrain.allocator.throughput import Job
from flowtrain.types import Role

MASTER_BYTES = 4
"""Parameters, gradients and moments are at least fp32."""

UNITS_KEPT = 3
"""Encode units whose gradients are still to come: those of two packs that are ready and of one that runs."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBreakdown:
    """Bytes by part; one row a candidate. Fields in the order of the table above."""

    weights: Floats
    copies: Floats
    gradients: Floats
    moments: Floats
    gathered: Floats
    activations: Floats
    working: Floats
    logits: Floats
    staging: Floats

    @property
    def total(self) -> Floats:
        total: Floats = sum((getattr(self, field.name) for field in fields(self)), np.zeros(1))
        return total

    def parts(self, row: int = 0) -> Mapping[str, float]:
        """Of one candidate, in order; a part of one row is the same for all."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(column[row if len(column) > 1 else 0]) for name, column in columns.items()}

    def lines(self, row: int = 0) -> list[str]:
        """One line a part that takes memory, and the total.

        >>> print("\\n".join(memory_of(load, Candidate(), Job(256)).lines()))
        weights        30.46 GB
        ...
        """
        parts = {**self.parts(row), "total": float(self.total[row])}
        return [f"{name:<12} {size / 1e9:8.2f} GB" for name, size in parts.items() if size > 0]


def memory_of(
    load: ModuleLoad, candidates: CandidateTable | Candidate, job: Job, loss_chunk_tokens: int | None = None
) -> MemoryBreakdown:
    """Of each candidate, that of its fullest stage, without the device's context.

    `loss_chunk_tokens`: rows of logits that exist at a time; None: those of a whole pack.
    """
    c = CandidateTable.of([candidates]) if isinstance(candidates, Candidate) else candidates
    first = _stage(load, c, job, loss_chunk_tokens, last=False)
    if int(np.max(c.pp)) == 1:
        return first
    last = _stage(load, c, job, loss_chunk_tokens, last=True)
    fuller = first.total >= last.total
    return MemoryBreakdown(
        *(np.where(fuller, getattr(first, field.name), getattr(last, field.name)) for field in fields(first))
    )


def _stage(load: ModuleLoad, c: CandidateTable, job: Job, loss_chunk_tokens: int | None, last: bool) -> MemoryBreakdown:
    """The first or the last stage; they are the same where there is one. Parts that do not vary have one row."""
    n, backward = job.bytes_per_number, int(load.needs_backward)
    master = max(MASTER_BYTES, n)
    sharded, layers = c.shard_degree > 1, np.ceil(load.layers / c.pp)
    outer = np.where(c.pp > 1, _outer_parameters(load)[last], load.outer_parameters)
    # Experts are divided among the ranks of a shard before their weights are.
    layer = (load.layer_parameters + load.expert_parameters / c.ep) / load.layers
    held = ((load.layer_parameters + load.expert_parameters) / load.layers * layers + outer) / (c.tp * c.shard_degree)
    trained = load.trained_parameters / load.parameters if load.parameters else 0.0
    gathered = (2 * layer + outer) * n + (layer * master if load.trains else 0.0)
    whole = kept_bytes(load, n)
    kept = np.array([whole, load.hidden * master])[c.recompute]
    rows = c.pack_tokens / (c.tp * c.cp)
    longer = np.maximum(0, load.longest_tokens - c.pack_tokens) * int(load.own_pack)
    more_rows = longer / (c.tp * c.cp)
    trained_rows = (c.pack_tokens + longer) * _trained_share(load)
    if job.max_trained_tokens is not None:
        trained_rows = np.minimum(trained_rows, job.max_trained_tokens)
    trained_rows = trained_rows / c.cp
    if loss_chunk_tokens is not None:
        trained_rows = np.minimum(trained_rows, loss_chunk_tokens)
    # Made, and turned into log-probabilities; a backward needs as much for two gradients.
    logits = trained_rows / c.tp * load.vocab * (2 * master + (n if n < master else 0))
    feature_bytes = load.pool_bytes / load.tokens if load.tokens else 0.0
    return MemoryBreakdown(
        weights=master * held,
        copies=np.where(sharded | (n >= master), 0.0, n * (layer * layers + outer) / c.tp),
        gradients=master * held * trained,
        moments=2 * master * held * trained,
        gathered=np.where(sharded, gathered / c.tp, 0.0),
        activations=backward * _in_flight(load, c, job, last) * layers * rows * kept
        + backward * layers * more_rows * kept,
        working=(rows + more_rows) * whole,
        logits=logits if last else np.where(c.pp > 1, 0.0, logits),
        staging=2 * feature_bytes * c.pack_tokens / c.cp + feature_bytes * longer / c.cp,
    )


def kept_bytes(load: ModuleLoad, n: int) -> float:
    """Bytes that a layer keeps of each row for its backward; n: bytes of a number in the compute dtype.

    Where no backward runs these are what lives while the layer runs.
    """
    master = max(MASTER_BYTES, n)
    hidden, queries, keys = load.hidden, load.heads * load.head_dim, load.kv_heads * load.head_dim
    encoder, trains = load.role is Role.PRODUCER, load.trains
    widths = 3 if load.gated else 1
    kept: float = 2 * hidden * master + (2 * queries + 2 * keys) * n
    kept += (3 if encoder else 1) * queries * n
    if load.head_norms:
        kept += (queries + keys) * (master + n if trains else master)
    inner = _inner_width(load)
    kept += widths * inner * n
    if trains:
        # Norms with a bias keep what goes in, and those without a bias what comes out as well.
        kept += 2 * hidden * master if load.gated or not encoder else 0
        kept += (2 if n == master else 4 if encoder else 5) * hidden * n + inner * n
    if load.expert_layers:
        kept += 2 * load.top_k * hidden * n * load.expert_layers / load.layers
    return float(kept)


def _inner_width(load: ModuleLoad) -> float:
    """Mean over layers of the width inside the MLP that a row goes through."""
    share = load.expert_layers / load.layers
    return share * load.top_k * load.expert_width + (1 - share) * load.mlp_width


def _outer_parameters(load: ModuleLoad) -> tuple[float, float]:
    """Of the first and of the last stage, where these are two."""
    embedding = load.vocab * load.hidden
    tied = load.outer_parameters < 2 * embedding
    return embedding, load.outer_parameters - (0 if tied else embedding)


def _trained_share(load: ModuleLoad) -> float:
    """Of the tokens, those that the head runs for, on average."""
    return min(1.0, load.head_tokens / load.tokens) if load.tokens else 0.0


def _in_flight(load: ModuleLoad, c: CandidateTable, job: Job, last: bool) -> Floats:
    """Packs whose activations a stage holds at once, in units of all its layers."""
    packs = np.maximum(1.0, np.ceil(job.step_samples / c.replicas * load.tokens / (c.pack_tokens * job.fill)))
    if load.role is Role.PRODUCER:
        return np.minimum(packs, 1 if load.replayed else UNITS_KEPT)
    first = 0 if last else c.pp - 1
    most: Floats = np.minimum(packs, 1 + first + np.where(c.vpp > 1, (c.pp - 1) / c.vpp, 0.0))
    return most
