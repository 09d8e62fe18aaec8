"""The allocator's problem solved by trying everything, from docs/allocator.md; imports nothing of the allocator.

Every candidate is a dictionary, every rate is worked out by itself in plain arithmetic. Loads, nodes and jobs are read
by attribute. `memory(load, candidates, job)` gives the bytes of a device: the memory model has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

Memory = Callable[[Any, list[dict[str, int]], Any], Sequence[float]]
TIE = 1e-9
MAX_COMBINATIONS = 4_000_000


def powers(most: int) -> list[int]:
    found, power = [], 1
    while power <= most:
        found.append(power)
        power *= 2
    return found


def all_candidates(load: Any, node: Any, num_devices: int, job: Any) -> Iterator[dict[str, int]]:
    """Loops over every degree, with the rules of the page checked one by one."""
    encoder = load.role.value == "producer"
    sizes = job.unit_patches if encoder else job.pack_tokens
    cores = sorted({*powers(node.devices), node.devices}) if node.name == "cpu" else [1]
    for threads, t, c, p in product(
        cores, powers(num_devices), powers(num_devices), range(1, min(load.layers, num_devices) + 1)
    ):
        one = t * c * p * threads
        if one > num_devices or t > node.devices // threads or (node.devices // threads) % t:
            continue
        if load.heads % (t * c) or (load.kv_heads % (t * c) and (t * c) % load.kv_heads) or load.mlp_width % t:
            continue
        if load.heads % t or (load.kv_heads % t and t % load.kv_heads):
            continue
        if encoder and (c > 1 or p > 1):
            continue
        if p & (p - 1) and load.layers % p:
            continue
        for d in range(1, min(num_devices // one, job.step_samples) + 1):
            for f in range(1, d + 1):
                if d % f or (f & (f - 1) and f != d):
                    continue
                for v, e, size, recompute in product(
                    (1, 2, 4), powers(max(1, load.experts)), sizes, (0, 1) if load.linear_passes > 1 else (0,)
                ):
                    if v > 1 and (p == 1 or load.layers % (p * v)):
                        continue
                    if e > 1 and (load.experts % e or (f * c) % e):
                        continue
                    if size < load.longest_tokens:
                        continue
                    yield {
                        "dp_replicate": d // f, "dp_shard": f, "tp": t, "cp": c, "pp": p, "vpp": v, "ep": e,
                        "pack_tokens": size, "recompute": recompute, "threads": threads,
                    }  # fmt: skip


def rate_of(load: Any, k: dict[str, int], node: Any, job: Any) -> tuple[float, float, int]:
    """(samples a second alone, the same on the backbone's devices, packs); rate 0 where there are too few packs."""
    encoder = load.role.value == "producer"
    t, c, p, v, e, f, r = (k[name] for name in ("tp", "cp", "pp", "vpp", "ep", "dp_shard", "dp_replicate"))
    d, shard, threads = r * f, f * c, k["threads"]
    number = {"bfloat16": 2, "float32": 4, "float64": 8}[job.dtype]
    eta = node.efficiency
    b = job.step_samples / d
    tokens = b * load.tokens
    if not encoder or load.trained_parameters:
        tokens = max(tokens, min(load.longest_tokens, load.tokens * job.step_samples))
    packs = max(1, math.ceil(tokens / (k["pack_tokens"] * job.fill) - 1e-9))
    if packs < p:
        return 0.0, 0.0, packs
    work = tokens / load.tokens / packs if load.tokens else b / packs
    rows = tokens / packs / c
    backward = 1 if load.linear_passes > 1 else 0
    full = k["recompute"] * backward

    peak = node.peak_flops[job.dtype] * threads**eta.thread * t * c
    product_speed = peak * eta.gemm * (rows / (rows + eta.half_rows) if load.tokens else 1.0)
    layers = (load.linear_passes + full) * load.linear_flops * work / product_speed
    layers += (load.attention_passes + full) * load.attention_flops * work / (peak * eta.attention)
    outer = load.linear_passes * load.outer_flops * work / product_speed

    def width(span: int) -> float:
        return (node.link_bandwidth if span * threads <= node.devices else node.network_bandwidth) * eta.link

    hidden = rows * load.hidden * number
    if t > 1:
        calls = 4 + 4 * backward + 2 * full
        layers += load.layers * calls * ((t - 1) / t * hidden / width(t) + node.latency_seconds)
    if c > 1:
        heads = 2 * (load.heads + load.kv_heads) * load.head_dim * rows * number / t
        once = (c - 1) / c * heads / width(t * c) + 4 * node.latency_seconds
        layers += load.layers * (1 + backward + full) * once
    if e > 1:
        once = load.top_k * hidden * (e - 1) / e / width(t * c * f) + node.latency_seconds
        layers += load.expert_layers * (1 + backward + full) * 2 * once

    # Every way to give whole layers to the stages; the last stage has the outer part too.
    one = layers / load.layers
    if p == 1:
        beat = layers + outer
    else:
        beat = min(
            max(math.ceil((load.layers - last) / (p - 1)) * one, last * one + outer) for last in range(load.layers + 1)
        )
        beat += (1 + backward) * v * (hidden / t / width(r * f * t * c * p) + node.latency_seconds)

    if shard > 1:
        trained = load.trained_parameters / load.parameters
        moved = (load.layer_parameters + load.outer_parameters) * (shard - 1) / shard
        moved += load.expert_parameters / e * max(0, shard - e) / shard
        gather = moved / (t * p) * ((1 + backward) * number + 4 * trained) / width(t * c * f)
        gather += (1 + 2 * backward) * load.layers / p * node.latency_seconds
        beat = max(beat, gather) + gather / max(1.0, load.layers / p)

    end = 0.0
    if load.trained_parameters:
        own = load.trained_parameters / (t * p * shard)
        if r > 1:
            reduction = 2 * (r - 1) / r * own * 4 / width(r * f * t * c * p) + node.latency_seconds
            end += max(0.0, reduction - 2.0 / 3.0 * beat)
        end += own * 28 / (node.memory_bandwidth * threads)
    imbalance = job.unit_imbalance if encoder else job.imbalance
    rate = job.step_samples / (imbalance * (packs + (p - 1) / v) * beat + end)
    return rate, rate / (1.0 + load.spread * math.sqrt(2.0 * math.log(d) / b)), packs


Point = tuple[int, float, float, int, float]
"""Devices, seconds a sample, the same on shared devices, packs, bytes."""


def points_of(load: Any, pool: Any, job: Any, memory: Memory) -> list[Point]:
    node = pool.node
    room = (1.0 - job.memory_reserve) * node.memory_bytes - node.context_bytes
    found = []
    candidates = list(all_candidates(load, node, node.devices * pool.num_nodes, job))
    for k, total in zip(candidates, memory(load, candidates, job), strict=True):
        used = float(total) / k["threads"]
        if used > room:
            continue
        rate, shared, packs = rate_of(load, k, node, job)
        if rate > 0:
            n = math.prod(k[name] for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "threads"))
            found.append((n, 1.0 / rate, 1.0 / shared, packs, used))
    return found


def best_of_all(
    loads: Any,
    cluster: Any,
    job: Any,
    memory: Memory,
    placements: frozenset[str],
    pareto: bool = False,
) -> tuple[float, int] | None:
    """(rate, devices) of the best plan; None where nothing fits. `pareto`: points that others beat are left out first.

    Raises:
        OverflowError: more than `MAX_COMBINATIONS` in one case.
    """
    backbone = next(m for m, load in enumerate(loads) if load.role.value == "consumer")
    points = {
        (m, h): points_of(load, pool, job, memory) for m, load in enumerate(loads) for h, pool in enumerate(cluster)
    }
    plans: list[tuple[np.ndarray, np.ndarray]] = []
    for partition in partitions(list(range(len(loads)))):
        name = "colocated" if len(partition) == 1 else "disaggregated" if len(partition) == len(loads) else "mixed"
        if name not in placements:
            continue
        for kinds in product(range(len(cluster)), repeat=len(partition)):
            groups = [
                group_points(loads, cluster, job, partition, g, kind, points, backbone) for g, kind in enumerate(kinds)
            ]
            if pareto:
                groups = [unbeaten(group) for group in groups]
            if all(groups):
                plans.append(combine(loads, cluster, job, partition, kinds, groups, backbone))
    found = [(seconds, devices) for seconds, devices in plans if len(seconds)]
    if not found:
        return None
    seconds = np.concatenate([s for s, _ in found])
    devices = np.concatenate([n for _, n in found])
    least = seconds.min()
    return 1.0 / least, int(devices[seconds <= least * (1 + TIE)].min())


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def group_points(
    loads: Any, cluster: Any, job: Any, partition: Any, g: int, kind: int, points: Any, backbone: int
) -> list[tuple[int, float, int]]:
    """(devices, seconds, packs of the backbone) of everything that a group can do."""
    group, node = partition[g], cluster[kind].node
    room = (1.0 - job.memory_reserve) * node.memory_bytes - node.context_bytes

    def crossing(m: int) -> float:
        return loads[m].pool_bytes * (2 if loads[m].gradient_returns else 1)

    encoders = [m for m in range(len(loads)) if m != backbone]
    moved = sum(crossing(m) for m in encoders if (m in group) != (backbone in group))
    if backbone not in group:
        moved = sum(crossing(m) for m in group)
    moved /= node.network_bandwidth * node.efficiency.link
    alone = len(group) == 1
    by_devices: dict[int, list[tuple[float, float, int]]] = {}
    for place, m in enumerate(group):
        mine: dict[int, list[tuple[float, float, int]]] = {}
        for n, seconds, shared, packs, used in points[m, kind]:
            mine.setdefault(n, []).append((seconds if alone else shared, used, packs if m == backbone else 1))
        if place == 0:
            by_devices = mine
            continue
        joined = {}
        for n in by_devices.keys() & mine.keys():
            pairs = [
                (s1 + s2, u1 + u2, max(p1, p2))
                for (s1, u1, p1), (s2, u2, p2) in product(by_devices[n], mine[n])
                if u1 + u2 <= room
            ]
            if len(pairs) > MAX_COMBINATIONS // 8:
                raise OverflowError(f"{len(pairs)} ways to share {n} devices")
            joined[n] = pairs
        by_devices = joined
    return [(n, max(s, moved / n), packs) for n, rows in by_devices.items() for s, _, packs in rows]


def unbeaten(points: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    kept: list[tuple[int, float, int]] = []
    for n, s, packs in sorted(set(points), key=lambda point: (point[0], point[1], -point[2])):
        if not any(s2 <= s and p2 >= packs for _, s2, p2 in kept):
            kept.append((n, s, packs))
    return kept


def combine(
    loads: Any, cluster: Any, job: Any, partition: Any, kinds: Any, groups: Any, backbone: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds a sample and devices of every combination of the groups' points that the cluster holds."""
    if math.prod(map(len, groups)) > MAX_COMBINATIONS:
        raise OverflowError(f"{[len(group) for group in groups]} points")
    num = len(groups)
    seconds: Any = 0.0
    slowest: Any = 0.0
    steps: Any = 0.0
    packs: Any = 1.0
    totals: dict[int, Any] = {}
    for g, (group, kind) in enumerate(zip(groups, kinds, strict=True)):
        shape = [1] * num
        shape[g] = len(group)
        n, s, m = (np.array(column).reshape(shape) for column in zip(*group, strict=True))
        totals[kind] = totals.get(kind, 0) + n
        if backbone in partition[g]:
            steps, packs = s, m
        elif any(loads[module].trained_parameters for module in partition[g]):
            slowest = np.maximum(slowest, s * (1 + job.headroom))
        else:
            seconds = np.maximum(seconds, s * (1 + job.headroom))
    total = np.maximum(seconds, np.maximum(slowest, steps) + slowest / packs)
    devices = sum(totals.values()) + 0 * total
    fits = np.ones(total.shape, dtype=bool)
    for kind, taken in totals.items():
        fits &= np.broadcast_to(taken <= cluster[kind].node.devices * cluster[kind].num_nodes, total.shape)
    return total[fits], devices[fits].astype(np.int64)
