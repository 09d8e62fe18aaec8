"""Random problems for the allocator: modules, clusters and steps of every kind, small enough to try everything.

Sizes are drawn so that communication, memory, bubbles, fill and drain each decide some of them.
"""

from __future__ import annotations

import random
from typing import Any

from flowtrain.allocator.hardware import Cluster, NodePool, NodeType
from flowtrain.allocator.load import ModuleLoad
from flowtrain.allocator.solve import Problem
from flowtrain.allocator.throughput import Job
from flowtrain.types import Role

PLACEMENTS = (
    frozenset({"colocated", "disaggregated", "mixed"}),
    frozenset({"disaggregated"}),
    frozenset({"colocated"}),
)


def random_problem(seed: int, max_devices: int, num_modules: int | None = None) -> Problem:
    """The problem of a seed: 1 to 4 modules on 1 to 3 kinds of node, `max_devices` in all at most."""
    draw = random.Random(seed)
    num = num_modules or draw.choice((1, 2, 2, 2, 3, 4))
    cluster = _cluster(draw, max_devices)
    longest = draw.choice((256, 1024))
    loads = (*(_encoder(draw, f"encoder-{n}", num) for n in range(num - 1)), _backbone(draw, num, longest))
    sizes = tuple(sorted(draw.sample((1024, 2048, 4096), draw.choice((1, 1, 2)))))
    job = Job(
        step_samples=draw.choice((4, 16, 64, 300)),
        pack_tokens=sizes,
        unit_patches=(4096,),
        fill=draw.choice((0.9, 1.0)),
        imbalance=draw.choice((1.0, 1.01)),
        unit_imbalance=draw.choice((1.0, 1.05)),
        headroom=draw.choice((0.0, 0.03)),
    )
    return Problem(loads, cluster, job, draw.choice(PLACEMENTS) if num > 1 else PLACEMENTS[0])


def _cluster(draw: random.Random, max_devices: int) -> Cluster:
    pools: list[NodePool] = []
    left = draw.randint(1, max_devices)
    for number in range(draw.choice((1, 1, 2, 3))):
        devices = draw.choice([n for n in (1, 2, 3, 4, 8) if n <= max(1, left)])
        num_nodes = draw.randint(1, max(1, left // devices))
        left -= devices * num_nodes
        pools.append(NodePool(_node(draw, f"kind-{number}", devices), num_nodes))
        if left < 1:
            break
    return tuple(pools)


def _node(draw: random.Random, name: str, devices: int) -> NodeType:
    return NodeType(
        name=name,
        devices=devices,
        memory_bytes=draw.choice((1.5e9, 3e9, 8e9)),
        memory_bandwidth=draw.choice((5e10, 5e11)),
        peak_flops={"bfloat16": draw.choice((2e13, 5e13, 1e14))},
        link_bandwidth=draw.choice((5e9, 5e10)),
        network_bandwidth=draw.choice((5e8, 5e9)),
        source="drawn",
        latency_seconds=draw.choice((0.0, 1e-5)),
        context_bytes=2e8,
    )


def _encoder(draw: random.Random, name: str, num_modules: int) -> ModuleLoad:
    hidden, layers = draw.choice((256, 512)), draw.choice((2, 4))
    weights = layers * 12 * hidden * hidden
    outer = hidden * hidden
    tokens = draw.choice((50.0, 300.0, 900.0))
    trains = draw.random() < 0.5
    parameters = weights + outer
    return ModuleLoad(
        name=name,
        role=Role.PRODUCER,
        layers=layers,
        hidden=hidden,
        heads=draw.choice((1, 2, 4) if num_modules < 3 else (1, 2)),
        kv_heads=1,
        head_dim=64,
        mlp_width=4 * hidden,
        gated=False,
        vocab=0,
        layer_parameters=weights,
        outer_parameters=outer,
        trained_parameters=parameters if trains else draw.choice((0, 0, outer)),
        tokens=tokens,
        longest_tokens=int(3 * tokens),
        linear_flops=2.0 * weights * tokens,
        attention_flops=4.0 * hidden * layers * tokens * draw.choice((100.0, 1000.0)),
        outer_flops=2.0 * outer * tokens,
        linear_passes=3 if trains else 1,
        attention_passes=3 if trains else 1,
        share=0.8,
        spread=draw.choice((0.0, 0.8)),
        pool_bytes=draw.choice((0.0, tokens * hidden * 2, tokens * hidden * 200)),
        gradient_returns=trains,
    )


def _backbone(draw: random.Random, num_modules: int, longest: int) -> ModuleLoad:
    hidden, layers = draw.choice((256, 512, 1024)), draw.choice((2, 3, 4, 6) if num_modules < 3 else (2, 3))
    weights = layers * 12 * hidden * hidden
    vocab = draw.choice((1000, 50000))
    tokens = longest / draw.choice((2.0, 6.0))
    passes: dict[str, Any] = draw.choice(
        ({"linear_passes": 3, "attention_passes": 3}, {"linear_passes": 2, "attention_passes": 3})
    )
    experts = draw.choice((0, 0, 4)) if num_modules < 3 else 0
    expert_parameters = layers * experts * 3 * hidden * hidden
    parameters = weights + 2 * vocab * hidden + expert_parameters
    return ModuleLoad(
        name="backbone",
        role=Role.CONSUMER,
        layers=layers,
        hidden=hidden,
        heads=draw.choice((2, 4, 6) if num_modules < 3 else (1, 3)),
        kv_heads=draw.choice((1, 2)) if num_modules < 3 else 1,
        head_dim=64,
        mlp_width=4 * hidden,
        gated=True,
        vocab=vocab,
        layer_parameters=weights,
        outer_parameters=2 * vocab * hidden,
        trained_parameters=parameters if passes["linear_passes"] == 3 else 0,
        tokens=tokens,
        longest_tokens=longest,
        linear_flops=2.0 * (weights + layers * 2 * 3 * hidden * hidden * bool(experts)) * tokens,
        attention_flops=2.0 * hidden * layers * tokens * tokens,
        outer_flops=2.0 * vocab * hidden * tokens / 2,
        experts=experts,
        top_k=2 if experts else 0,
        expert_width=hidden if experts else 0,
        expert_layers=layers if experts else 0,
        expert_parameters=expert_parameters,
        **passes,
    )
