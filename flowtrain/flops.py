"""FLOPs that training needs, by the formula of `docs/mfu.md` (contract C13): no padding, no recompute, no overhead.

A product of (m, k) and (k, n) is 2mkn. Forward, for ℓ tokens of a sample and p patches of an image:

    encoder     2 · (embed · p  +  layer weights · rows  +  exit · p / patches_per_token) + 4 · attention width · pairs
    projector   2 · weights · p / patches_per_token
    backbone    (2 · weights that a token meets  +  state) · ℓ  +  4 · attention width · pairs
    head        2 · hidden · vocab · head_tokens

`rows` are patches and class tokens. `pairs` attend to each other, summed over layers: p² within an image or tile,
p · window in windowed layers; ℓ² / 2 under the causal mask, w · ℓ - w² / 2 in layers with a window of w < ℓ tokens,
none in recurrent layers (`state` instead). A token meets the router, `top_k` experts and the shared ones. The head
counts where it is computed: at trained tokens.

| part | forward | gradient of activations | gradient of weights |
|---|---|---|---|
| trains | 1 | 1 | 1 |
| frozen, something before it trains and the sample reaches that | 1 | 1 (attention 2: no weights, two factors) | – |
| frozen otherwise | 1 | – | – |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowtrain.shapes import EncoderShape, ModelShape, ProjectorShape, TextShape
from flowtrain.types import Module, SampleMeta

NOMINAL_TOKENS = 1024
NOMINAL_TRAINED = 0.5
"""A sample to weigh layers and head by, where no row has been seen."""


class StepFlops(NamedTuple):
    """Training FLOPs of a step by module."""

    encoder: float
    projector: float
    backbone: float

    @property
    def total(self) -> float:
        return self.encoder + self.projector + self.backbone

    def of(self, module: Module) -> float:
        return {Module.ENCODER: self.encoder, Module.PROJECTOR: self.projector, Module.BACKBONE: self.backbone}[module]


def encoder_flops(encoder: EncoderShape, image_patches: Sequence[int]) -> float:
    """Forward FLOPs of one encoder; one entry per image, or clip."""
    patch, layers, attention = patch_flops(encoder), 2.0 * encoder.token_weights, 4.0 * encoder.attention_width
    return sum(
        patch * patches + layers * encoder.rows(patches) + attention * encoder.attended_pairs(patches)
        for patches in image_patches
    )


def encoder_terms(encoder: EncoderShape) -> tuple[float, float]:
    """Forward FLOPs of one patch without attention, and of one pair of patches in one layer's attention."""
    classes = encoder.class_tokens / encoder.tile_patches if encoder.tile_patches else 0.0
    linear = patch_flops(encoder) + 2.0 * (1.0 + classes) * encoder.token_weights
    return linear, 4.0 * encoder.attention_width


def patch_flops(encoder: EncoderShape) -> float:
    """Forward FLOPs of one patch before and behind the layers."""
    embed = encoder.embed_weights if encoder.embed_products is None else encoder.embed_products
    return 2.0 * (embed + encoder.exit_weights / encoder.projector.patches_per_token)


def projector_flops(projector: ProjectorShape, patches: int) -> float:
    """Forward FLOPs of a projector."""
    return 2.0 * projector.weights * patches / projector.patches_per_token


class BackboneFlops(NamedTuple):
    """Forward FLOPs of the backbone: what goes with the tokens, with pairs of them, with trained tokens."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def backbone_flops(text: TextShape, lengths: Sequence[int], head_tokens: int | None = None) -> BackboneFlops:
    """Forward FLOPs of the backbone; one length per sample. `head_tokens`: where the head runs (None: everywhere)."""
    tokens = sum(lengths)
    linear = (2.0 * text.token_weights + text.state_flops) * tokens
    attention = 4.0 * text.attention_width * sum(text.attended_pairs(length) for length in lengths)
    return BackboneFlops(linear, attention, 2.0 * text.head_weights * (tokens if head_tokens is None else head_tokens))


def section_costs(text: TextShape) -> tuple[list[float], float]:
    """Forward FLOPs of each layer, and of the head, for a token of a sample of `NOMINAL_TOKENS` of which
    `NOMINAL_TRAINED` have a label: what a pipeline is cut by."""
    width = 4.0 * text.attention_width / NOMINAL_TOKENS
    layers = [
        2.0 * text.layer_token_weights(layer) + width * text.layer_pairs(layer, NOMINAL_TOKENS)
        for layer in range(text.layers)
    ]
    return layers, 2.0 * text.head_weights * NOMINAL_TRAINED


def palm_flops(text: TextShape, lengths: Sequence[int]) -> float:
    """Training FLOPs of the backbone by the PaLM paper's formula (arXiv 2204.02311, appendix B): 6N + 12·L·H·Q·T for
    a token of a sample of T. All weights train, all tokens predict, the full square attends; for comparison only."""
    weights = 6.0 * (text.token_weights + text.head_weights)
    attention = 12.0 * text.attention_layers * text.attention_width
    return sum((weights + attention * length) * length for length in lengths)


def step_flops(shape: ModelShape, samples: Iterable[SampleMeta], frozen: frozenset[Module]) -> StepFlops:
    """Training FLOPs of these samples.

    A gradient flows through a frozen projector when the encoder trains, and through a frozen backbone for the samples
    with images when encoder or projector trains.
    """
    encoder = projector = backbone = 0.0
    encoder_trains = Module.ENCODER not in frozen
    vision_trains = encoder_trains or Module.PROJECTOR not in frozen
    encoder_passes = 3 if encoder_trains else 1
    projector_passes = 3 if Module.PROJECTOR not in frozen else 2 if encoder_trains else 1
    for sample in samples:
        encoder += encoder_passes * encoder_flops(shape.vision, [image.patches for image in sample.images])
        projector += projector_passes * projector_flops(shape.projector, sample.patches)
        linear, attention, head = backbone_flops(shape.text, [sample.tokens], sample.trained_tokens)
        if Module.BACKBONE not in frozen:
            backbone += 3 * (linear + attention + head)
        elif vision_trains and sample.images:
            backbone += 2 * (linear + head) + 3 * attention
        else:
            backbone += linear + attention + head
    return StepFlops(encoder, projector, backbone)
