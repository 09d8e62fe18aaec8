"""FLOPs that training needs, by the formula of `docs/mfu.md` (contract C13): no padding, no recompute, no overhead.

A product of (m, k) and (k, n) is 2mkn. Forward, for ℓ tokens of a sample and p patches of an image:

    encoder     2 · embed · p  +  layers · (2 · weights · p  +  4 · hidden · p · span)    span: image, or window
    projector   2 · weights · p / patches_per_token
    backbone    layers · (2 · weights · ℓ  +  2 · heads · head_dim · ℓ²)  +  2 · hidden · vocab · head_tokens

ℓ² is halved by the causal mask: 4 · ℓ² / 2. The head counts where it is computed: at trained tokens.

| part | forward | gradient of activations | gradient of weights |
|---|---|---|---|
| trains | 1 | 1 | 1 |
| frozen, something before it trains and the sample reaches that | 1 | 1 (attention 2: no weights, two factors) | – |
| frozen otherwise | 1 | – | – |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowtrain.shapes import ModelShape
from flowtrain.types import Module, SampleMeta


class StepFlops(NamedTuple):
    """Training FLOPs of a step by module."""

    encoder: float
    projector: float
    backbone: float

    @property
    def total(self) -> float:
        return self.encoder + self.projector + self.backbone


def encoder_flops(shape: ModelShape, image_patches: Sequence[int]) -> float:
    """Forward FLOPs of the encoder; one entry per image."""
    linear, attention = encoder_terms(shape)
    vision = shape.vision
    windowed_layers = vision.layers - vision.full_layers
    flops = 0.0
    for patches in image_patches:
        window = min(patches, vision.window_patches or patches)
        flops += linear * patches + attention * (vision.full_layers * patches + windowed_layers * window) * patches
    return flops


def encoder_terms(shape: ModelShape) -> tuple[float, float]:
    """Forward FLOPs of one patch without attention, and of one pair of patches in one layer's attention."""
    vision = shape.vision
    return float(2 * (vision.embed_weights + vision.layers * vision.layer_weights)), float(4 * vision.hidden)


def projector_flops(shape: ModelShape, patches: int) -> float:
    """Forward FLOPs of the projector."""
    return 2.0 * shape.projector.weights * patches / shape.projector.patches_per_token


def backbone_flops(shape: ModelShape, lengths: Sequence[int], head_tokens: int | None = None) -> float:
    """Forward FLOPs of the backbone; one length per sample. `head_tokens`: where the head runs (None: everywhere)."""
    linear, attention, head = _backbone_terms(shape, lengths, sum(lengths) if head_tokens is None else head_tokens)
    return linear + attention + head


def _backbone_terms(shape: ModelShape, lengths: Sequence[int], head_tokens: int) -> tuple[float, float, float]:
    text = shape.text
    linear = 2.0 * text.layers * text.layer_weights * sum(lengths)
    attention = 2.0 * text.layers * text.heads * text.head_dim * sum(length * length for length in lengths)
    return linear, attention, 2.0 * text.head_weights * head_tokens


def step_flops(shape: ModelShape, samples: Iterable[SampleMeta], frozen: frozenset[Module]) -> StepFlops:
    """Training FLOPs of these samples.

    A gradient flows through a frozen projector when the encoder trains, and through a frozen backbone for the samples
    with images when encoder or projector trains.
    """
    encoder = projector = backbone = 0.0
    encoder_trains = Module.ENCODER not in frozen
    vision_trains = encoder_trains or Module.PROJECTOR not in frozen
    for sample in samples:
        encoder += (3 if encoder_trains else 1) * encoder_flops(shape, [image.patches for image in sample.images])
        passes = 3 if Module.PROJECTOR not in frozen else 2 if encoder_trains else 1
        projector += passes * projector_flops(shape, sample.patches)
        linear, attention, head = _backbone_terms(shape, [sample.tokens], sample.trained_tokens)
        if Module.BACKBONE not in frozen:
            backbone += 3 * (linear + attention + head)
        elif vision_trains and sample.images:
            backbone += 2 * (linear + head) + 3 * attention
        else:
            backbone += linear + attention + head
    return StepFlops(encoder, projector, backbone)
