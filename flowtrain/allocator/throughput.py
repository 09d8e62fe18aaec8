"""Samples a second of a module under each candidate of a table (pure, vectorised).

A step of B samples on d = r·f replicas gives each b = B/d samples in M packs; with tp, cp, pp, vpp, ep as in C14,
L layers, F peak, η efficiency, w passes (more with recompute), and all FLOPs those of b/M samples:

    matrix products   w · linear / (tp · cp · F · η_gemm · rows/(rows + half_rows)),   rows = tokens of a pack / cp
    attention         w · pairs / (tp · cp · F · η_attention)
    tensor parallel   (4 forward, 4 backward, 2 more under full recompute) · (tp−1)/tp · rows · hidden · bytes, a layer
    context parallel  (forward, backward, recompute) · 2 · (heads + kv heads)/tp · head_dim · rows · bytes · (cp−1)/cp, a layer
    experts           2 · (forward, backward, recompute) · top_k · rows · hidden · bytes · (ep−1)/ep, a layer with experts
    beat              slowest stage: m layers, or the outer part with those that are left for it (best whole m)
    sharded weights   gathered once forward, once backward, gradients scattered: overlaps the beat, all but the first layer
    step              imbalance · (M + (pp−1)/vpp) · beat  +  reduction of gradients beyond one backward  +  optimizer

tp lies inside a node; cp, f and the whole module use the link while they fit in a node, else the network. A module that
waits for its slowest replica in each step (it trains, or is the backbone) is no faster than its longest sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.hardware import NodeType
from flowtrain.allocator.load import Candidate, CandidateTable, Floats, Integers, ModuleLoad
from flowtrain.types import Role

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
OPTIMIZER_BYTES = 28
"""Read and written a trained parameter: weight, gradient and two moments read, the weight and two moments written."""
SELECTIVE_PASSES = 0.05
"""What selective recompute runs again, as a share of a forward."""
SYNC_OVERLAP = 2.0 / 3.0
"""Share of a beat, its backward, behind which the reduction of gradients hides."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a step is, whatever the module.

    Attributes:
        step_samples: samples of an optimizer update.
        dtype: compute dtype.
        pack_tokens: choices for the most tokens of a pack; `unit_patches` the same of an encode unit.
        fill: share of a pack that is filled on average.
        imbalance: slowest rank over mean, of packs; `unit_imbalance` of encode units.
        headroom: by how much an encoder should be faster than the backbone, because its work a step varies.
        memory_reserve: share of device memory left free.
    """

    step_samples: int
    dtype: str = "bfloat16"
    pack_tokens: tuple[int, ...] = (8192,)
    unit_patches: tuple[int, ...] = (16384,)
    fill: float = 0.95
    imbalance: float = 1.003
    unit_imbalance: float = 1.02
    headroom: float = 0.03
    memory_reserve: float = 0.08

    @property
    def bytes_per_number(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def sizes(self, load: ModuleLoad) -> tuple[int, ...]:
        return self.pack_tokens if load.role is Role.CONSUMER else self.unit_patches


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """One row a candidate: `rate` is 0 where the candidate cannot run (fewer packs than stages)."""

    rate: Floats
    packs: Integers
    beat_seconds: Floats
    exposed_seconds: Floats
    """Of a step: gradients' reduction and optimizer."""


def rates(load: ModuleLoad, table: CandidateTable | Candidate, node: NodeType, job: Job) -> Rates:
    """Rates of all rows of a table, or of one candidate as a table of one row."""
    c = CandidateTable.of([table]) if isinstance(table, Candidate) else table
    samples = job.step_samples / c.replicas
    tokens = samples * load.tokens
    waits = load.trains or load.role is Role.CONSUMER
    slowest = np.maximum(tokens, min(load.longest_tokens, load.tokens * job.step_samples)) if waits else tokens
    stretch = np.divide(slowest, tokens, out=np.ones_like(tokens), where=tokens > 0)
    packs = np.maximum(1, np.ceil(slowest / (c.pack_tokens * job.fill) - 1e-9)).astype(np.int64)
    in_pack = samples * stretch / packs  # samples' worth of work in a pack of the slowest replica
    rows = slowest / packs / c.cp

    forward, backward, again = 1, int(load.needs_backward), np.where(c.recompute == 2, 1, 0) * int(load.needs_backward)
    extra = np.where(c.recompute == 1, SELECTIVE_PASSES, again) * int(load.needs_backward)
    speed = node.peak(job.dtype) * c.threads**node.efficiency.thread * c.tp * c.cp
    gemm = speed * node.efficiency.gemm * rows / (rows + node.efficiency.half_rows)
    gemm = np.where(rows > 0, gemm, np.inf)
    layers = (load.linear_passes + extra) * load.linear_flops * in_pack / gemm
    layers += (load.attention_passes + extra) * load.attention_flops * in_pack / (speed * node.efficiency.attention)
    outer = load.linear_passes * load.outer_flops * in_pack / gemm

    link = node.link_bandwidth * node.efficiency.link
    network = node.network_bandwidth * node.efficiency.link
    width = job.bytes_per_number

    def bandwidth(span: Integers) -> Floats:
        return np.where(span * c.threads <= node.devices, link, network)

    passes = forward + backward + again
    hidden = rows * load.hidden * width
    heads = 2 * (load.heads + load.kv_heads) * load.head_dim * rows * width / c.tp
    inner = bandwidth(c.tp * c.cp)
    layers += np.where(
        c.tp > 1,
        load.layers
        * (
            (4 * (forward + backward) + 2 * again) * (c.tp - 1) / c.tp * hidden / link
            + (4 * (forward + backward) + 2 * again) * node.latency_seconds
        ),
        0.0,
    )
    layers += np.where(
        c.cp > 1,
        load.layers * passes * ((c.cp - 1) / c.cp * heads / inner + 4 * node.latency_seconds),
        0.0,
    )
    if load.experts:
        routed = load.top_k * hidden * (c.ep - 1) / c.ep / bandwidth(c.tp * c.cp * c.dp_shard)
        layers += np.where(
            c.ep > 1, load.expert_layers * passes * (2 * routed + 2 * node.latency_seconds), 0.0
        )
    beat = _slowest_stage(layers, outer, c.pp, load.layers)
    whole = bandwidth(c.world_size)
    between = (forward + backward) * c.vpp * (hidden / c.tp / whole + node.latency_seconds)
    beat += np.where(c.pp > 1, between, 0.0)

    shard = c.shard_degree
    dense = (load.layer_parameters + load.outer_parameters) / (c.tp * c.pp) * (shard - 1) / shard
    experts = load.expert_parameters / (c.tp * c.pp * c.ep) * np.maximum(0, shard - c.ep) / shard
    trained = load.trained_parameters / load.parameters if load.parameters else 0.0
    gathered = (dense + experts) * ((forward + backward) * width + GRADIENT_BYTES * trained)
    fsdp = gathered / bandwidth(c.tp * c.cp * c.dp_shard)
    fsdp += np.where(shard > 1, (1 + 2 * backward) * load.layers / c.pp * node.latency_seconds, 0.0)
    beat = np.maximum(beat, fsdp) + fsdp / np.maximum(1.0, load.layers / c.pp)

    own = load.trained_parameters / (c.tp * c.pp * shard)
    r = c.dp_replicate
    reduction = np.where(r > 1, 2 * (r - 1) / r * own * GRADIENT_BYTES / whole + node.latency_seconds, 0.0)
    reduction = np.maximum(0.0, reduction - SYNC_OVERLAP * beat) if load.trains else np.zeros_like(beat)
    exposed = reduction + own * OPTIMIZER_BYTES / (node.memory_bandwidth * c.threads)

    imbalance = job.imbalance if load.role is Role.CONSUMER else job.unit_imbalance
    step = imbalance * (packs + (c.pp - 1) / c.vpp) * beat + exposed
    with np.errstate(divide="ignore"):
        rate = np.where(packs >= c.pp, job.step_samples / step, 0.0)
    return Rates(rate, packs, beat, exposed)


def _slowest_stage(layers: Floats, outer: Floats, pp: Integers, num_layers: int) -> Floats:
    """Seconds of the slowest of `pp` stages when the outer part shares the last one with as many layers as is best.

    With at most m layers in each other stage, k = max(0, L − m(pp−1)) are left for the last one. The larger of m and
    k + outer is least where they cross or one before.
    """
    one = layers / num_layers
    ratio = np.divide(outer, one, out=np.zeros_like(outer), where=one > 0)

    def seconds(m: Floats) -> Floats:
        last = np.maximum(0.0, num_layers - m * (pp - 1)) + ratio
        return np.maximum(m, last) * one

    crossing = np.ceil(np.maximum((num_layers + ratio) / pp, np.minimum(ratio, num_layers)) - 1e-9)
    crossing = np.clip(crossing, 1.0, num_layers)
    best = np.minimum(seconds(crossing), seconds(np.maximum(1.0, crossing - 1)))
    return np.where(one > 0, np.where(pp > 1, best, layers + outer), outer)


def crossings(c: CandidateTable, devices_per_node: int) -> Integers:
    """How often a group of ranks that talk to each other in every pack leaves its node: shards, then stages."""
    inner = c.tp * c.cp * c.threads
    span = inner * c.dp_shard
    groups = c.dp_replicate * c.pp
    of_shards = groups * (-(-span // devices_per_node) - 1)
    stage = inner * c.replicas
    of_stages = (c.pp - 1) * c.replicas * np.where(stage * c.pp > devices_per_node, 1, 0)
    of_context = groups * c.dp_shard * (-(-inner // devices_per_node) - 1)
    return of_shards + of_stages + of_context
