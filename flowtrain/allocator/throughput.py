"""Samples a second of a module under each candidate of a table (pure, vectorised).

A step of B samples on d = r·f replicas gives each b = B/d samples in M packs. Degrees as in C14, L layers, peak F,
efficiencies η, w passes (recompute adds to them), n(…) bytes of a number, rows = tokens of a pack / cp. In a pack:

| part | seconds |
|---|---|
| matrix products | w · FLOPs / (tp · cp · F · η_gemm · rows / (rows + half_rows)) |
| attention | w · FLOPs / (tp · cp · F · η_attention) |
| tensor parallel, a layer | (4 forward + 4 backward + 2 again) · (tp-1)/tp · rows · hidden · n / link |
| context parallel, a layer | (forward + backward + again) · (cp-1)/cp · 2 (heads + kv heads) · head_dim/tp · rows · n |
| experts, a layer of them | (forward + backward + again) · 2 · (ep-1)/ep · top_k · rows · hidden · n |
| between stages | (forward + backward) · vpp · rows · hidden / tp · n |

The *beat* is the slowest stage: of the ways to give whole layers to stages, the last of which has the outer part too,
the best. Sharded weights are gathered in the forward and again in the backward, and gradients scattered, behind the
beat but for one layer's. Then

    step = imbalance · (M + (pp-1)/vpp) · beat  +  reduction of gradients, beyond one backward  +  optimizer

tp lies inside a node; cp, f and a whole module use the link while they fit in a node, else the network. A module that
waits for its slowest replica in each step (it trains, or is the backbone) is no faster than its longest sample. An
encoder on the backbone's devices takes the images as the packs bring them (`shared_rate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowtrain.allocator.hardware import NodeType
from flowtrain.allocator.load import Candidate, CandidateTable, Floats, Integers, ModuleLoad
from flowtrain.shapes import DTYPE_BYTES
from flowtrain.types import Role

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
OPTIMIZER_BYTES = 28
"""Read and written a trained parameter: weight, gradient and two moments read, the weight and two moments written."""
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
        max_trained_tokens: most trained tokens of a pack, which bound its logits; None: any number.
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
    max_trained_tokens: int | None = None

    @property
    def bytes_per_number(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def sizes(self, load: ModuleLoad) -> tuple[int, ...]:
        return self.pack_tokens if load.role is Role.CONSUMER else self.unit_patches


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """One row a candidate: `rate` is 0 where the candidate cannot run (fewer packs than stages)."""

    rate: Floats
    shared_rate: Floats
    """The same when the module shares its devices with the backbone: each rank encodes the images of its own packs."""
    packs: Integers
    beat_seconds: Floats


class Work(NamedTuple):
    """What packs (or encode units) hold, an entry each: rows, and FLOPs of one forward as in `ModuleLoad`."""

    tokens: Floats
    linear_flops: Floats
    attention_flops: Floats
    outer_flops: Floats


def rates(load: ModuleLoad, table: CandidateTable | Candidate, node: NodeType, job: Job) -> Rates:
    """Rates of all rows of a table, or of one candidate as a table of one row."""
    c = CandidateTable.of([table]) if isinstance(table, Candidate) else table
    samples = job.step_samples / c.replicas
    tokens = samples * load.tokens
    waits = load.trains or load.role is Role.CONSUMER
    slowest = np.maximum(tokens, min(load.longest_tokens, load.tokens * job.step_samples)) if waits else tokens
    stretch = slowest / tokens if load.tokens else np.ones_like(tokens)
    packs = np.maximum(1, np.ceil(slowest / (c.pack_tokens * job.fill) - 1e-9)).astype(np.int64)
    of_pack = samples * stretch / packs
    work = Work(
        slowest / packs, load.linear_flops * of_pack, load.attention_flops * of_pack, load.outer_flops * of_pack
    )
    beat = beats(load, c, node, job, work)
    reduction, optimizer = step_end(load, c, node, beat)
    imbalance = job.imbalance if load.role is Role.CONSUMER else job.unit_imbalance
    step = imbalance * (packs + (c.pp - 1) / c.vpp) * beat + reduction + optimizer
    rate = np.where(packs >= c.pp, job.step_samples / step, 0.0)
    return Rates(rate, rate / _own_images(load, c, samples), packs, beat)


def beats(load: ModuleLoad, c: CandidateTable, node: NodeType, job: Job, work: Work) -> Floats:
    """Seconds of the slowest stage for each pack of `work`: one row a candidate, or one candidate for all packs."""
    rows = work.tokens / c.cp
    layers, outer = _compute(load, c, node, job, work, rows)
    layers = layers + _communication(load, c, node, job, rows)
    backward = int(load.needs_backward)
    whole = _bandwidth(c.world_size, c, node)
    sent = rows * load.hidden * job.bytes_per_number / c.tp
    between = (1 + backward) * c.vpp * (sent / whole + node.latency_seconds)
    beat = _slowest_stage(layers, outer, c.pp, load.layers) + np.where(c.pp > 1, between, 0.0)
    gathers = _gathers(load, c, node, job)
    slower: Floats = np.maximum(beat, gathers) + gathers / np.maximum(1.0, load.layers / c.pp)
    return slower


def _own_images(load: ModuleLoad, c: CandidateTable, samples: Floats) -> Floats:
    """By how much the slowest of d replicas exceeds the mean when it encodes what its packs hold, not what balances.

    Packs are balanced by the backbone's cost; the images of b samples are then a sum of b draws, and the largest of d
    such sums is expected near 1 + spread · √(2 ln d / b) of the mean.
    """
    above: Floats = 1.0 + load.spread * np.sqrt(2.0 * np.log(c.replicas) / samples)
    return above


def least_device_seconds(load: ModuleLoad, node: NodeType, job: Job, full_recompute: bool = False) -> float:
    """Devices times seconds a sample that no candidate, or none with full recompute, goes below: arithmetic alone, at
    the best efficiency."""
    again = int(full_recompute and load.needs_backward)
    linear = (load.linear_passes + again) * load.linear_flops + load.linear_passes * load.outer_flops
    attention = (load.attention_passes + again) * load.attention_flops
    return (linear / node.efficiency.gemm + attention / node.efficiency.attention) / node.peak(job.dtype)


def _compute(
    load: ModuleLoad, c: CandidateTable, node: NodeType, job: Job, work: Work, rows: Floats
) -> tuple[Floats, Floats]:
    """Seconds of a pack in all layers, and outside of them, on the devices of one stage."""
    again = _again(load, c)
    speed = node.peak(job.dtype) * c.threads**node.efficiency.thread * c.tp * c.cp
    product = node.efficiency.gemm * speed
    if load.tokens:
        product = product * rows / (rows + node.efficiency.half_rows)
    layers = (load.linear_passes + again) * work.linear_flops / product
    layers = layers + (load.attention_passes + again) * work.attention_flops / (node.efficiency.attention * speed)
    return layers, load.linear_passes * work.outer_flops / product


def _again(load: ModuleLoad, c: CandidateTable) -> Integers:
    """Forwards of the layers that run again before or in the backward."""
    again: Integers = (c.recompute + int(load.replayed)) * int(load.needs_backward)
    return again


def _communication(load: ModuleLoad, c: CandidateTable, node: NodeType, job: Job, rows: Floats) -> Floats:
    """Seconds of a pack that collectives inside of the layers take; none of it overlaps."""
    backward = int(load.needs_backward)
    again = _again(load, c)
    passes = 1 + backward + again
    hidden = rows * load.hidden * job.bytes_per_number
    calls = 4 * (1 + backward) + 2 * again
    tensor = calls * ((c.tp - 1) / c.tp * hidden / _bandwidth(c.tp, c, node) + node.latency_seconds)
    heads = 2 * (load.heads + load.kv_heads) * load.head_dim * rows * job.bytes_per_number / c.tp
    context = passes * ((c.cp - 1) / c.cp * heads / _bandwidth(c.tp * c.cp, c, node) + 4 * node.latency_seconds)
    seconds = load.layers * (np.where(c.tp > 1, tensor, 0.0) + np.where(c.cp > 1, context, 0.0))
    if load.experts:
        routed = load.top_k * hidden * (c.ep - 1) / c.ep / _bandwidth(c.tp * c.cp * c.dp_shard, c, node)
        experts = 2 * passes * (routed + node.latency_seconds)
        seconds = seconds + load.expert_layers * np.where(c.ep > 1, experts, 0.0)
    return seconds


def _gathers(load: ModuleLoad, c: CandidateTable, node: NodeType, job: Job) -> Floats:
    """Seconds of a pack in which sharded weights and gradients of a stage travel; experts are cut by ep already."""
    shard, backward = c.shard_degree, int(load.needs_backward)
    dense = (load.layer_parameters + load.outer_parameters) * (shard - 1) / shard
    experts = load.expert_parameters / c.ep * np.maximum(0, shard - c.ep) / shard
    trained = load.trained_parameters / load.parameters if load.parameters else 0.0
    width = (1 + backward) * job.bytes_per_number + GRADIENT_BYTES * trained
    seconds: Floats = (dense + experts) / (c.tp * c.pp) * width / _bandwidth(c.tp * c.cp * c.dp_shard, c, node)
    seconds += np.where(shard > 1, (1 + 2 * backward) * load.layers / c.pp * node.latency_seconds, 0.0)
    return seconds


def step_end(load: ModuleLoad, c: CandidateTable, node: NodeType, beat: Floats) -> tuple[Floats, Floats]:
    """Seconds of a step in which replicas reduce gradients, beyond one backward, and in which the optimizer runs."""
    if not load.trains:
        return np.zeros_like(beat), np.zeros_like(beat)
    own = load.trained_parameters / (c.tp * c.pp * c.shard_degree)
    r, whole = c.dp_replicate, _bandwidth(c.world_size, c, node)
    reduction = np.where(r > 1, 2 * (r - 1) / r * own * GRADIENT_BYTES / whole + node.latency_seconds, 0.0)
    optimizer = own * OPTIMIZER_BYTES / (node.memory_bandwidth * c.threads)
    return np.maximum(0.0, reduction - SYNC_OVERLAP * beat), optimizer


def _bandwidth(span: Integers, c: CandidateTable, node: NodeType) -> Floats:
    """Of a group of `span` neighbouring ranks."""
    inside = span * c.threads <= node.devices
    bandwidth: Floats = np.where(inside, node.link_bandwidth, node.network_bandwidth) * node.efficiency.link
    return bandwidth


def _slowest_stage(layers: Floats, outer: Floats, pp: Integers, num_layers: int) -> Floats:
    """Seconds of the slowest of `pp` stages when the outer part shares the last one with as many layers as is best.

    With at most m layers in each other stage, k = max(0, L − m(pp−1)) are left for the last one. The larger of m and
    k + outer is least where they cross or one before.
    """
    one = layers / num_layers
    ratio = np.divide(outer, one, out=np.zeros_like(outer), where=one > 0)

    def seconds(m: Floats) -> Floats:
        slowest: Floats = np.maximum(m, np.maximum(0.0, num_layers - m * (pp - 1)) + ratio) * one
        return slowest

    crossing = np.ceil(np.maximum((num_layers + ratio) / pp, np.minimum(ratio, num_layers)) - 1e-9)
    crossing = np.clip(crossing, 1.0, num_layers)
    best = np.minimum(seconds(crossing), seconds(np.maximum(1.0, crossing - 1)))
    found: Floats = np.where(one > 0, np.where(pp > 1, best, layers + outer), outer)
    return found


def crossings(c: CandidateTable, devices_per_node: int) -> Integers:
    """How often a group of ranks that talk to each other in every pack leaves its node: shards, then stages."""
    inner = c.tp * c.cp * c.threads
    span = inner * c.dp_shard
    groups = c.dp_replicate * c.pp
    of_shards = groups * (-(-span // devices_per_node) - 1)
    stage = inner * c.replicas
    of_stages = (c.pp - 1) * c.replicas * np.where(stage * c.pp > devices_per_node, 1, 0)
    of_context = groups * c.dp_shard * (-(-inner // devices_per_node) - 1)
    total: Integers = of_shards + of_stages + of_context
    return total
