"""What the model of the allocator predicts for the configurations of arXiv 2606.23087, beside what that paper reports.

The paper names sizes (VLM-6B, 32B, 72B), a ViT with a Qwen3 backbone, 64 to 256 NPUs of 64 GB and 256 packs of 8,192
tokens; not the chip, the widths, the data's sizes or its FLOP formula. Here stand models of those sizes with the widths
of public models, the row of an Ascend 910B class, and the trace `mix_sft_8k`. Nothing is fitted to what is reported.

    python -m benchmarks.allocator_paper [--json FILE]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import Check, Result, main
from flowtrain.allocator.candidates import WHOLE
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import HARDWARE, NodePool
from flowtrain.allocator.policies import flow_matching, stage_balanced
from flowtrain.allocator.problem import Question
from flowtrain.allocator.solve import Problem, Solution
from flowtrain.allocator.stats import DataStats, read_stats
from flowtrain.shapes import EncoderShape, ModelShape, ProjectorShape, TextShape
from flowtrain.types import Module

TRACE = Path(__file__).parent / "traces/mix_sft_8k.parquet"
PACKS = 256
PACK_TOKENS = 8192

# hidden, layers, heads, kv heads, MLP width: of Qwen3-4B widened to 5.3 B, Qwen3-32B, and Qwen2.5-72B
BACKBONES = {
    "VLM-6B": (3072, 36, 24, 8, 11008),
    "VLM-32B": (5120, 64, 64, 8, 25600),
    "VLM-72B": (8192, 80, 64, 8, 29568),
}
VOCAB = 151_936
REPORTED: dict[tuple[str, int], dict[str, float | None]] = {
    ("VLM-6B", 256): {"flow": 52.1, "stage_balanced": 43.3, "monolithic": 40.0, "llm_only": None, "tokens": 5125},
    ("VLM-32B", 64): {"flow": 54.9, "stage_balanced": 48.1, "monolithic": 42.3, "llm_only": 60.2, "tokens": None},
    ("VLM-32B", 128): {"flow": 54.8, "stage_balanced": 47.4, "monolithic": 40.9, "llm_only": 59.3, "tokens": 884},
    ("VLM-32B", 256): {"flow": 53.6, "stage_balanced": 46.6, "monolithic": 39.0, "llm_only": 58.9, "tokens": None},
    ("VLM-72B", 256): {"flow": 52.9, "stage_balanced": 43.9, "monolithic": 31.2, "llm_only": None, "tokens": 448},
}
"""MFU in percent and tokens/s a device on InfoVQA; stage_balanced stands for DistTrain, monolithic for Megatron."""


def shape(name: str) -> ModelShape:
    hidden, layers, heads, kv_heads, width = BACKBONES[name]
    text = TextShape(
        hidden, layers, heads, kv_heads, 128, width, VOCAB, tied=False, norm_vectors=2 * hidden, outer_vectors=hidden
    )
    merger = 4 * 1280
    projector = ProjectorShape(1, 4, hidden, merger * merger + merger * hidden, 1280)
    vision = EncoderShape(
        name="vision",
        modality="vision",
        hidden=1280,
        layers=32,
        heads=16,
        attention_width=1280,
        mlp_width=5120,
        gated=False,
        patch_values=1176,
        embed_weights=1176 * 1280,
        layer_vectors=9 * 1280,
        outer_vectors=0,
        full_layers=32,
        projector=projector,
    )
    return ModelShape("paper", text, (vision,), 0)


def question(name: str, devices: int, stats: DataStats, placement: str) -> Question:
    node = HARDWARE["ascend910b"]
    within = stats.within(PACK_TOKENS)
    step = round(PACKS * PACK_TOKENS * 0.95 / float(within.lengths.mean()))
    return Question(
        shape(name),
        stats,
        frozenset({Module.ENCODER, Module.PROJECTOR}),
        (NodePool(node, devices // node.devices),),
        step_samples=step,
        pack_tokens=(PACK_TOKENS,),
        placements=frozenset({placement}),
    )


def mfu(problem: Problem, found: Solution) -> float:
    flops = found.rate * sum(load.train_flops for load in problem.loads)
    peak = problem.cluster[0].node.peak(problem.job.dtype)
    return 100.0 * flops / (sum(pool.devices for pool in problem.cluster) * peak)


def row(name: str, devices: int, stats: DataStats) -> dict[str, Any]:
    reported = REPORTED[name, devices]
    apart = question(name, devices, stats, "disaggregated").problem()
    together = question(name, devices, stats, "colocated").problem()
    alone = replace(apart, loads=(replace(apart.loads[-1], pool_bytes=0.0),))
    plans = {
        "flow": (apart, flow_matching(apart, device_bytes, WHOLE)),
        "stage_balanced": (apart, stage_balanced(apart, device_bytes, WHOLE)),
        "monolithic": (together, flow_matching(together, device_bytes, WHOLE)),
        "llm_only": (alone, flow_matching(replace(alone, placements=frozenset({"colocated"})), device_bytes, WHOLE)),
    }
    result: dict[str, Any] = {"model": name, "devices": devices}
    for kind, (problem, found) in plans.items():
        predicted = "does not fit" if found is None else round(mfu(problem, found), 1)
        result[f"{kind}, predicted"] = predicted
        result[f"{kind}, reported"] = "-" if reported[kind] is None else reported[kind]
    flow = plans["flow"][1]
    if flow is not None:
        tokens = flow.rate * apart.loads[-1].tokens / devices
        result["tokens/s a device, predicted"] = round(tokens)
        result["encoder's share of devices"] = round(flow.choices[0].candidate.devices / devices, 3)
    result["tokens/s a device, reported"] = "-" if reported["tokens"] is None else reported["tokens"]
    return result


def measure(seed: int) -> Result:
    stats = read_stats(TRACE)
    rows = [row(name, devices, stats) for name, devices in REPORTED]
    columns = list(dict.fromkeys(column for found in rows for column in found))
    settings = {
        "trace": TRACE.name,
        "packs": PACKS,
        "pack_tokens": PACK_TOKENS,
        "device": "ascend910b",
        "unit": "MFU, %",
    }
    below = sum(found["flow, predicted"] < found["stage_balanced, predicted"] for found in rows)
    table = [{column: found.get(column, "-") for column in columns} for found in rows]
    return Result(settings, table, [Check("flow predicted below stage_balanced", below, "==", 0)])


if __name__ == "__main__":
    main("allocator_paper", lambda options: measure(options.seed))
