"""MFU by hand: a model of a few numbers, three samples, and every expected figure with its arithmetic.

backbone   hidden 8, 2 layers, 2 heads of 4, 1 key/value head, gated MLP of 16, vocabulary 32
           attention 8·8 (q) + 2·8·4 (k, v) + 8·8 (o) = 192, MLP 3·8·16 = 384: 576 a layer, 1152 in all; head 256
encoder    hidden 4, 3 layers (1 full, 2 in windows of 4 patches), MLP 2·4·8 = 64, attention 4·4·4 = 64:
           128 a layer, 384 in all; patch embedding 12·4 = 48
projector  16·16 + 16·8 = 384, from 4 patches to a token

A: image of 16 patches, 10 tokens, 3 trained    B: images of 8 and 4, 8 tokens, 2    C: text, 4 tokens, 4
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain.flops import palm_flops, step_flops
from flowtrain.shapes import EncoderShape, ModelShape, MoeShape, ProjectorShape, TextShape
from flowtrain.telemetry.mfu import Fleet, Peak
from flowtrain.types import Cut, ImageMeta, Module, SampleMeta

TEXT = TextShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_width=16, vocab=32, tied=True)
ENCODER = EncoderShape(
    name="vision",
    modality="vision",
    hidden=4,
    layers=3,
    heads=1,
    attention_width=4,
    mlp_width=8,
    gated=False,
    patch_values=12,
    embed_weights=48,
    layer_vectors=0,
    outer_vectors=0,
    full_layers=1,
    window_patches=4,
    projector=ProjectorShape(num_mergers=1, patches_per_token=4, width_out=8, weights=384, vectors=0),
)
SHAPE = ModelShape("by hand", TEXT, (ENCODER,), image_token_id=None)


def sample(tokens: int, trained: int, *patches: int) -> SampleMeta:
    vision = sum(patches) // 4
    images = tuple(ImageMeta(8, 8, number // 4, number, 0) for number in patches)
    return SampleMeta.of(0, 0, "row", tokens - vision, vision, trained, images)


A, B, C = sample(10, 3, 16), sample(8, 2, 8, 4), sample(4, 4)
ROWS = [A, B, C]

# 2·(48 + 384) a patch; 4·4 for each of 1·16² + 2·16·4 = 384 pairs
ENCODER_A = 864 * 16 + 16 * 384
assert ENCODER_A == 19_968
# 12 patches; pairs of the image of 8: 64 + 2·8·4, of the image of 4: 16 + 2·4·4
ENCODER_B = 864 * 12 + 16 * (128 + 48)
assert ENCODER_B == 13_184
# 2·1152 a token; 4·8 for each of 2 layers · ℓ²/2 pairs; 2·256 a trained token
BACKBONE_A = 2304 * 10 + 32 * 100 + 512 * 3
BACKBONE_B = 2304 * 8 + 32 * 64 + 512 * 2
BACKBONE_C = 2304 * 4 + 32 * 16 + 512 * 4
assert (BACKBONE_A, BACKBONE_B, BACKBONE_C) == (27_776, 21_504, 11_776)


def test_everything_trains() -> None:
    found = step_flops(SHAPE, ROWS, frozenset())
    assert found.encoder == 3 * (19_968 + 13_184) == 99_456
    assert found.projector == 3 * 2 * 384 * (4 + 3) == 16_128
    assert found.backbone == 3 * (27_776 + 21_504 + 11_776) == 183_168, "Σℓ² of samples, not (10 + 8 + 4)²"


def test_per_module_total_and_the_papers_formula() -> None:
    """One producer and two consumers of 100,000 FLOP/s each, a step of 2 s."""
    peak = Peak(100_000.0, "by hand")
    found = Fleet((peak,), (peak, peak)).mfu(
        step_flops(SHAPE, ROWS, frozenset()), 2.0, palm_flops(TEXT, [row.tokens for row in ROWS])
    )
    assert found.all == pytest.approx(49.792)  # (99,456 + 16,128 + 183,168) / (2 · 300,000)
    assert found.encoder == pytest.approx(57.792)  # (99,456 + 16,128) / (2 · 100,000)
    assert found.backbone == pytest.approx(45.792)  # 183,168 / (2 · 200,000)
    # 6·(1152 + 256) + 12·2·8·ℓ a token: 10·10,368 + 8·9,984 + 4·9,216 = 220,416, of 2 · 200,000
    assert found.backbone_palm == pytest.approx(55.104)


def test_a_frozen_tower_is_forward_only_and_its_projector_counts_on_the_consumers() -> None:
    flops = step_flops(SHAPE, ROWS, frozenset({Module.ENCODER}))
    assert flops == (33_152, 16_128, 183_168)
    peak = Peak(100_000.0, "by hand")
    found = Fleet((peak,), (peak,), Cut.BEFORE_PROJECTOR).mfu(flops, 2.0)
    assert found.encoder == pytest.approx(16.576)  # 33,152 / 200,000
    assert found.backbone == pytest.approx(99.648)  # (16,128 + 183,168) / 200,000


def test_a_frozen_backbone_passes_gradients_of_samples_with_images() -> None:
    """Matrices twice, attention three times for A and B: 2·24,576 + 3·3,200 and 2·19,456 + 3·2,048; C forward only."""
    flops = step_flops(SHAPE, ROWS, frozenset({Module.BACKBONE}))
    assert flops == (99_456, 16_128, 58_752 + 45_056 + 11_776)


def test_all_frozen_but_the_projector() -> None:
    flops = step_flops(SHAPE, ROWS, frozenset({Module.ENCODER, Module.BACKBONE}))
    assert flops == (33_152, 16_128, 115_584)


def test_a_token_meets_the_router_and_two_of_four_experts() -> None:
    """The second layer: 192 attention + 8·4 router + 2·(3·8·8) experts = 608 instead of 576, 32 more a token."""
    moe = MoeShape(experts=4, top_k=2, expert_width=8, layers=(1,))
    shape = replace(SHAPE, text=replace(TEXT, moe=moe))
    assert shape.text.token_weights == 1184
    assert step_flops(shape, ROWS, frozenset()).backbone == 183_168 + 3 * 2 * 32 * 22 == 187_392


def test_windows_count_within_themselves() -> None:
    """Were the windowed layers full, A's pairs would be 3·16² = 768, B's 3·(8² + 4²) = 240."""
    full = replace(SHAPE, encoders=(replace(ENCODER, full_layers=3),))
    assert step_flops(full, ROWS, frozenset(Module)).encoder == 864 * 28 + 16 * (768 + 240) == 40_320
    assert step_flops(SHAPE, ROWS, frozenset(Module)).encoder == 864 * 28 + 16 * (384 + 176) == 33_152
