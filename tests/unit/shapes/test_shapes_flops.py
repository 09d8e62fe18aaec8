"""What freezing, packing and windows do to the FLOPs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from shapes_configs import CONFIGS

from flowtrain.flops import backbone_flops, encoder_flops, palm_flops, projector_flops, section_costs, step_flops
from flowtrain.packing import CostModel
from flowtrain.shapes import Mixer, ModelShape, MoeShape, RecurrentShape, read_shape
from flowtrain.types import Cut, ImageMeta, Module, SampleMeta


@pytest.fixture
def shape(emoji: Path) -> ModelShape:
    return read_shape(emoji / "model")


def sample(
    text: int, images: tuple[int, ...] = (), trained: int = 3, pairs: Callable[[int], int] = lambda patches: 0
) -> SampleMeta:
    metas = tuple(ImageMeta(8, 8, patches // 4, patches, pairs(patches)) for patches in images)
    return SampleMeta.of(0, 0, "row", text, sum(images) // 4, trained, metas)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_layers_add_up_to_the_backbone(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    text = read_shape(tmp_path).text
    layers = range(text.layers)
    assert sum(map(text.layer_token_weights, layers)) == text.token_weights
    for length in (1, 9, 300):
        assert sum(text.layer_pairs(layer, length) for layer in layers) == text.attended_pairs(length)
    costs, head = section_costs(text)
    assert len(costs) == text.layers
    assert min(costs) > 0
    assert head > 0


def test_attention_is_within_samples_and_images(shape: ModelShape) -> None:
    assert backbone_flops(shape.text, [10, 10]).total == 2 * backbone_flops(shape.text, [10]).total
    assert backbone_flops(shape.text, [20]).total > backbone_flops(shape.text, [10, 10]).total
    assert encoder_flops(shape.vision, [16, 16]) == 2 * encoder_flops(shape.vision, [16])
    assert encoder_flops(shape.vision, [32]) > encoder_flops(shape.vision, [16, 16])


def test_windows_bound_the_attention(shape: ModelShape) -> None:
    windowed = replace(shape.vision, full_layers=0, window_patches=16)
    assert encoder_flops(windowed, [64]) == encoder_flops(windowed, [16] * 4)
    assert encoder_flops(windowed, [16]) == encoder_flops(shape.vision, [16])


def test_freezing(shape: ModelShape) -> None:
    row, text = sample(20, (16, 8)), sample(20)
    forward = step_flops(shape, [row], frozenset(Module))
    assert forward.encoder == encoder_flops(shape.vision, [16, 8])
    assert forward.projector == projector_flops(shape.projector, 24)
    assert forward.backbone == backbone_flops(shape.text, [row.tokens], head_tokens=3).total
    trains = step_flops(shape, [row], frozenset())
    assert trains == (3 * forward.encoder, 3 * forward.projector, 3 * forward.backbone)
    tower_frozen = step_flops(shape, [row], frozenset({Module.ENCODER}))
    assert tower_frozen == (forward.encoder, 3 * forward.projector, 3 * forward.backbone)
    projector_frozen = step_flops(shape, [row], frozenset({Module.PROJECTOR}))
    assert projector_frozen.projector == 2 * forward.projector
    backbone_frozen = step_flops(shape, [row], frozenset({Module.BACKBONE}))
    assert 2 * forward.backbone < backbone_frozen.backbone < 3 * forward.backbone
    without_images = step_flops(shape, [text], frozenset({Module.BACKBONE}))
    assert without_images.backbone == backbone_flops(shape.text, [20], head_tokens=3).total
    assert trains.total == 3 * forward.total


@pytest.mark.parametrize("frozen", [(), ("encoder",), ("encoder", "projector"), ("backbone",)])
@pytest.mark.parametrize("cut", list(Cut))
def test_costs_are_the_flops_of_the_sides(shape: ModelShape, frozen: tuple[str, ...], cut: Cut) -> None:
    row = sample(20, (16, 8), pairs=shape.vision.attended_pairs)
    modules = frozenset(map(Module, frozen))
    cost = CostModel.from_shape(shape, modules, cut)
    flops = step_flops(shape, [row], modules)
    moved = flops.projector if cut is Cut.BEFORE_PROJECTOR else 0.0
    assert cost.real(cost.pack_cost([row])) == pytest.approx(flops.backbone + moved)
    assert cost.real(cost.encode_cost([row])) == pytest.approx(flops.encoder + flops.projector - moved)
    assert cost.pack_cost([row, row]) == 2 * cost.pack_cost([row])


def test_the_formula_of_other_papers_takes_the_square_and_every_token(shape: ModelShape) -> None:
    length = 64
    ours = backbone_flops(shape.text, [length])
    assert palm_flops(shape.text, [length]) == pytest.approx(3 * (ours.total + ours.attention))


def test_a_token_meets_some_experts(shape: ModelShape) -> None:
    dense = shape.text
    moe = MoeShape(experts=8, top_k=2, expert_width=dense.mlp_width, layers=tuple(range(dense.layers)), shared_width=4)
    text = replace(dense, moe=moe)
    more = 2 * dense.mlp_weights + dense.hidden * (3 * 4 + 8) - dense.mlp_weights
    assert text.token_weights == dense.token_weights + dense.layers * more
    assert text.expert_parameters == dense.layers * 8 * dense.mlp_weights


def test_windows_of_the_backbone(shape: ModelShape) -> None:
    text = shape.text
    windowed = replace(text, mixers=(Mixer.WINDOW,) * text.layers, window=16)
    assert backbone_flops(windowed, [16]) == backbone_flops(text, [16])
    assert backbone_flops(windowed, [64]).attention < backbone_flops(text, [64]).attention
    long, longer = (backbone_flops(windowed, [length]).attention for length in (1000, 2000))
    assert longer == pytest.approx(2 * long, rel=0.02)
    recurrent = RecurrentShape(weights=text.attention_weights, vectors=0, state_flops=7)
    state = replace(text, mixers=(Mixer.RECURRENT,) * text.layers, recurrent=recurrent)
    assert backbone_flops(state, [64]).attention == 0
    assert backbone_flops(state, [64]).linear == backbone_flops(text, [64]).linear + 64 * 7 * text.layers
