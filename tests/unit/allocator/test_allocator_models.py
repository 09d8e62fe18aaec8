"""From a model and sizes of rows to loads, policies, explanations and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.allocator_instances import random_problem
from flowtrain.allocator.candidates import WHOLE, Scope, Side
from flowtrain.allocator.explain import explain
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import HARDWARE, NodePool, node_type
from flowtrain.allocator.load import Candidate
from flowtrain.allocator.loads import loads_of, unused_encoders
from flowtrain.allocator.policies import POLICIES
from flowtrain.allocator.problem import Question
from flowtrain.allocator.refuse import refusal
from flowtrain.allocator.search import search
from flowtrain.allocator.stats import assumed_stats, read_stats
from flowtrain.allocator.throughput import Job, rates
from flowtrain.errors import ConfigError, DataError, PlanError
from flowtrain.flops import step_flops
from flowtrain.plan import Layout
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.types import ImageMeta, Module, Role, SampleMeta

SEVEN = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 28, "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2, "in_channels": 3,
    },
}  # fmt: skip
"""Qwen2.5-VL-7B's published sizes."""


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("seven")
    (folder / "config.json").write_text(json.dumps(SEVEN))
    return read_shape(folder)


def question(shape: ModelShape, num_nodes: int, **more: Any) -> Question:
    return Question(shape, assumed_stats(), frozenset(), (NodePool(HARDWARE["h100"], num_nodes),), **more)


@pytest.mark.parametrize("frozen", [(), ("encoder",), ("encoder", "projector"), ("backbone",), ("backbone", "encoder")])
def test_work_of_the_modules_is_that_of_the_flops(seven: ModelShape, frozen: tuple[str, ...]) -> None:
    stats = assumed_stats()
    modules = frozenset(map(Module, frozen))
    loads = loads_of(seven, stats, modules, "bfloat16")
    per_token = seven.projector.patches_per_token
    samples = []
    for number in range(len(stats)):
        tokens = stats.image_tokens[stats.image_sample == number].tolist()
        images = tuple(ImageMeta(1, 1, size, size * per_token, 0) for size in tokens)
        text, trained = int(stats.text_tokens[number]), int(stats.trained_tokens[number])
        samples.append(SampleMeta.of(number, number, str(number), text, sum(tokens), trained, images))
    expected = step_flops(seven, samples, modules)
    assert sum(load.train_flops for load in loads) * len(stats) == pytest.approx(
        expected.total, rel=0.05 if "backbone" in frozen else 1e-9
    )
    parameters = sum(load.parameters for load in loads)
    assert parameters == sum(seven.parameters(module) for module in Module)
    trained_of = sum(seven.parameters(module) for module in Module if module.value not in frozen)
    assert sum(load.trained_parameters for load in loads) == trained_of


def test_projector_runs_on_its_side_of_the_cut(seven: ModelShape) -> None:
    both = loads_of(seven, assumed_stats(), frozenset(), "bfloat16")
    cut = loads_of(seven, assumed_stats(), frozenset({Module.ENCODER}), "bfloat16")
    size = seven.projector.parameters
    assert both[0].parameters - cut[0].parameters == cut[1].parameters - both[1].parameters == size
    assert not cut[0].gradient_returns
    assert both[0].gradient_returns
    assert cut[0].pool_bytes > both[0].pool_bytes * 0.3


def test_an_encoder_without_data_gets_nothing(seven: ModelShape) -> None:
    ear = replace(seven.encoders[0], name="audio", modality="audio")
    shape = replace(seven, encoders=(*seven.encoders, ear))
    assert [load.name for load in loads_of(shape, assumed_stats(), frozenset(), "bfloat16")] == [
        seven.vision.name,
        "backbone",
    ]
    assert unused_encoders(shape, assumed_stats()) == ["audio"]
    assert len(loads_of(shape, assumed_stats(audio=True), frozenset(), "bfloat16")) == 3


@settings(max_examples=30, deadline=None)
@given(images=st.floats(0.0, 3.0), length=st.floats(0.3, 3.0))
def test_scaled_sizes_have_scaled_means(images: float, length: float) -> None:
    stats = assumed_stats()
    scaled = stats.scaled(images=images, length=length)
    assert len(scaled) == len(stats)
    assert scaled.vision_tokens.mean() == pytest.approx(images * length * stats.vision_tokens.mean(), rel=1e-3, abs=6)
    assert scaled.text_tokens.mean() == pytest.approx(length * stats.text_tokens.mean(), rel=0.01)
    summed = np.bincount(scaled.image_sample, weights=scaled.image_tokens, minlength=len(stats))
    assert np.array_equal(summed, scaled.vision_tokens)


def test_sizes_are_read_from_traces_of_both_forms(tmp_path: Path) -> None:
    joint, single = tmp_path / "joint.parquet", tmp_path / "single.parquet"
    parquet.write_table(
        pa.table({"n_text_tokens": [5, 7], "n_vision_tokens": [6, 0], "unit_tokens": [[2, 4], []]}), joint
    )
    parquet.write_table(
        pa.table({"n_text_tokens": [9], "n_vision_tokens": [7], "n_images": [2], "n_answer_tokens": [4]}), single
    )
    assert read_stats(joint).image_tokens.tolist() == [2, 4]
    assert read_stats(joint).lengths.tolist() == [11, 7]
    assert read_stats(single).image_tokens.tolist() == [4, 3]
    assert read_stats(single).trained_tokens.tolist() == [4]
    for name, content in (("a.parquet", "no"), ("b.jsonl", "no"), ("c.jsonl", ""), ("d.jsonl", '{"text_tokens": 1}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=name):
            read_stats(tmp_path / name)
    with pytest.raises(ConfigError, match=r"missing\.parquet"):
        read_stats(tmp_path / "missing.parquet")


def test_rows_longer_than_a_pack_are_left_out() -> None:
    stats = assumed_stats().within(1000)
    assert stats.lengths.max() <= 1000
    assert stats.vision_tokens.sum() == stats.image_tokens.sum()
    with pytest.raises(ConfigError, match=r"packing\.max_tokens"):
        stats.within(1)


def test_rows_with_packs_of_their_own_are_planned_for(seven: ModelShape) -> None:
    longest = int(assumed_stats().lengths.max())
    packs, half = (longest // 2,), longest // 2
    asked = question(seven, 4, pack_tokens=packs, max_row_tokens=longest)
    plain = question(seven, 4, pack_tokens=packs)
    load, short = asked.problem().loads[-1], plain.problem().loads[-1]
    assert (load.longest_tokens, load.tokens > short.tokens, short.longest_tokens <= half) == (longest, True, True)
    found = search(asked.problem(), device_bytes)
    assert found is not None
    assert found.choices[-1].candidate.pack_tokens == half
    for name, other in asked.other_data().items():
        assert search(other, device_bytes) is not None
        assert other.job.pack_tokens == ((2 * half,) if name == "twice the length" else packs), "they need not grow"


def test_no_policy_beats_flow_matching() -> None:
    compared = 0
    for seed in range(3000, 3040):
        problem = random_problem(seed, 24)
        best = search(problem, device_bytes)
        for name, policy in POLICIES.items():
            other = policy(problem, device_bytes, WHOLE)
            if other is not None:
                assert best is not None, (seed, name)
                assert other.rate <= best.rate * (1 + 1e-9), (seed, name)
                compared += 1
    assert compared > 60


def test_shares_of_devices_follow_the_policy(seven: ModelShape) -> None:
    problem = question(seven, 4, placements=frozenset({"disaggregated"})).problem()
    even = POLICIES["uniform"](problem, device_bytes, WHOLE)
    assert even is not None
    assert max(even.group_devices) <= 16
    proportional = POLICIES["flops_proportional"](problem, device_bytes, WHOLE)
    assert proportional is not None
    flops = [load.train_flops for load in problem.loads]
    share = 32 * flops[0] / sum(flops)
    assert proportional.choices[0].candidate.devices <= share + 1


def test_a_scope_keeps_what_is_decided(seven: ModelShape) -> None:
    problem = question(seven, 4, placements=frozenset({"disaggregated"})).problem()
    layout = Layout(dp_shard=8, tp=2)
    scope = Scope(consumers=Side(layout=layout), producers=Side(most=3))
    found = search(problem, device_bytes, scope)
    assert found is not None
    assert found.choices[-1].candidate.layout == layout
    assert found.choices[0].candidate.replicas <= 3


def test_the_explanation_holds(seven: ModelShape) -> None:
    asked = question(seven, 2)
    problem = asked.problem()
    best = search(problem, device_bytes)
    assert best is not None
    why = explain(problem, device_bytes, best, WHOLE, asked.other_data())
    assert 1 <= len(why.neighbours) <= 3
    for other in why.neighbours:
        assert other.rate <= best.rate * (1 + 1e-9)
        assert other.loss_percent == pytest.approx(100 * (1 - other.rate / best.rate))
        assert other.solution != best
    gains = {effect.what: effect.gain_percent for effect in why.sensitivity}
    fewer, more = gains["half as many images"], gains["half as many again"]
    assert fewer is not None
    assert more is not None
    assert fewer > 0 > more
    assert all(effect.gain_percent is None or effect.gain_percent >= -1e-6 for effect in why.levers)
    assert "the rate; " in why.binding


def test_what_does_not_fit_is_refused_with_a_way_out(seven: ModelShape) -> None:
    one = replace(HARDWARE["l40s"], devices=2)
    problem = replace(question(seven, 1).problem(), cluster=(NodePool(one, 1),))
    assert search(problem, device_bytes) is None
    error = refusal(problem, device_bytes, WHOLE)
    assert "GB" in error or "at least" in error
    nodes = int(error.split("it would fit on ")[1].split(" x ")[0])
    larger = replace(problem, cluster=(NodePool(one, nodes),))
    assert search(larger, device_bytes) is not None


def test_short_packs_are_told_to_grow(seven: ModelShape) -> None:
    problem = question(seven, 8).problem()
    short = replace(problem, job=replace(problem.job, pack_tokens=(64,)))
    assert "packing.max_tokens" in refusal(short, device_bytes, WHOLE)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_known_by_the_drivers_name(device: str, name: str) -> None:
    assert node_type(device).name == name


@pytest.mark.parametrize("device", ["abacus", "NVIDIA L40", "NVIDIA GeForce GTX 1080", "some cpu"])
def test_other_devices_are_refused_with_a_choice(device: str) -> None:
    with pytest.raises(PlanError, match="choose one of"):
        node_type(device)


def test_a_dtype_without_a_figure_is_refused() -> None:
    with pytest.raises(PlanError, match="float64"):
        HARDWARE["l40s"].peak("float64")


def test_an_encoder_beside_the_backbone_takes_images_as_they_come(seven: ModelShape) -> None:
    load = loads_of(seven, assumed_stats(), frozenset(), "bfloat16")[0]
    job = Job(1024, unit_patches=(load.longest_tokens,))
    many = rates(load, Candidate(dp_replicate=64, pack_tokens=load.longest_tokens), HARDWARE["h100"], job)
    alone = rates(load, Candidate(pack_tokens=load.longest_tokens), HARDWARE["h100"], job)
    assert load.spread > 0.3
    assert many.shared_rate[0] < many.rate[0]
    assert alone.shared_rate[0] == alone.rate[0]
    assert load.role is Role.PRODUCER


def test_the_page_has_the_hardware_table() -> None:
    page = (Path(__file__).parents[3] / "docs/allocator.md").read_text()
    told = {cells[0]: cells[1:] for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) == 8}
    for name, node in HARDWARE.items():
        figures = (
            node.peak_flops["bfloat16"] / 1e12, node.peak_flops["float32"] / 1e12, node.memory_bytes / 1e9,
            node.memory_bandwidth / 1e12, node.link_bandwidth / 1e9, node.network_bandwidth / 1e9,
        )  # fmt: skip
        assert told[name] == [*(f"{figure:g}" for figure in figures), node.source]
