"""FLOPs against torch's counter on the real model, and what freezing and packing do to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.flops import backbone_flops, encoder_flops, projector_flops, step_flops
from flowtrain.packing import CostModel
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.types import Cut, ImageMeta, Module, SampleMeta


@pytest.fixture
def shape(emoji: Path) -> ModelShape:
    return read_shape(emoji / "model")


def sample(text: int, images: tuple[int, ...] = (), trained: int = 3) -> SampleMeta:
    metas = tuple(ImageMeta(8, 8, patches // 4, patches) for patches in images)
    return SampleMeta(0, 0, "row", text, sum(images) // 4, trained, metas)


def test_forward_agrees_with_torchs_counter(emoji: Path, shape: ModelShape) -> None:
    """The counter sees attention as the full square in the math backend: the causal half is added back."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(emoji / "model", attn_implementation="eager")
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    grid = torch.tensor([[1, 4, 6]])
    pixels = torch.zeros(24, shape.vision.patch_values)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.model.get_image_features(pixels, grid)
    seen = counter.get_total_flops()
    assert encoder_flops(shape.vision, [24]) + projector_flops(shape.projector, 24) == pytest.approx(seen, rel=0.01)

    length = 32
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, length), 20))
    square = 4 * shape.text.layers * shape.text.heads * shape.text.head_dim * length**2
    assert backbone_flops(shape.text, [length]).total + square / 2 == pytest.approx(counter.get_total_flops(), rel=0.01)


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
    row = sample(20, (16, 8))
    modules = frozenset(map(Module, frozen))
    cost = CostModel.from_shape(shape, modules, cut)
    flops = step_flops(shape, [row], modules)
    moved = flops.projector if cut is Cut.BEFORE_PROJECTOR else 0.0
    assert cost.real(cost.pack_cost([row])) == pytest.approx(flops.backbone + moved)
    assert cost.real(cost.encode_cost([row])) == pytest.approx(flops.encoder + flops.projector - moved)
    assert cost.pack_cost([row, row]) == 2 * cost.pack_cost([row])
