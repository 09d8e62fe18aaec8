"""Predicted time of samples on both sides, in FLOPs: linear in tokens and patches, quadratic within a sample or image.

    pack_cost    Σ samples   token · ℓ  +  token_pair · ℓ²  +  trained_token · t  +  projected_patch · p
    encode_cost  Σ images    patch · p  +  patch_pair · p²

ℓ tokens, t trained tokens, p patches. Two packs of equal length differ by Σℓ²: one long sample costs more than many
short ones. A coefficient counts the passes that its part makes (forward, activations, weights), which freezing sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flowtrain.flops import encoder_terms
from flowtrain.shapes import ModelShape
from flowtrain.types import Cut, Module, SampleMeta


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients as above; they stand in the decision log."""

    token: float
    token_pair: float
    trained_token: float
    projected_patch: float
    patch: float
    patch_pair: float

    @classmethod
    def from_shape(cls, shape: ModelShape, frozen: frozenset[Module], cut: Cut) -> CostModel:
        """From the FLOPs of the modules; the projector counts on the side of the cut where it runs."""
        encoder_trains, projector_trains = Module.ENCODER not in frozen, Module.PROJECTOR not in frozen
        encoder_passes = 3 if encoder_trains else 1
        projector_passes = 3 if projector_trains else 2 if encoder_trains else 1
        # A whole pack goes through the graph, so one sample with images makes the backward of all its neighbours.
        flows = encoder_trains or projector_trains
        linear_passes, pair_passes = (3, 3) if Module.BACKBONE not in frozen else (2, 3) if flows else (1, 1)
        text, vision = shape.text, shape.vision
        linear, pair = encoder_terms(shape)
        # A window is small against the images that have several: attention in windows is linear in the patches.
        windowed = pair * (vision.layers - vision.full_layers) * (vision.window_patches or 0)
        projector = projector_passes * 2.0 * shape.projector.weights / shape.projector.patches_per_token
        after = cut is Cut.AFTER_PROJECTOR
        return cls(
            token=linear_passes * 2.0 * text.layers * text.layer_weights,
            token_pair=pair_passes * 2.0 * text.layers * text.heads * text.head_dim,
            trained_token=linear_passes * 2.0 * text.head_weights,
            projected_patch=0.0 if after else projector,
            patch=encoder_passes * (linear + windowed) + (projector if after else 0.0),
            patch_pair=encoder_passes * pair * vision.full_layers,
        )

    def sample_cost(self, sample: SampleMeta) -> float:
        """Backbone side, one sample."""
        length = sample.tokens
        return (
            self.token * length
            + self.token_pair * length * length
            + self.trained_token * sample.trained_tokens
            + self.projected_patch * sample.patches
        )

    def pack_cost(self, samples: Iterable[SampleMeta]) -> float:
        """Backbone side; additive over the samples of a pack, since none of them sees another."""
        return sum(map(self.sample_cost, samples), 0.0)

    def encode_cost(self, samples: Iterable[SampleMeta]) -> float:
        """Encoder side; additive over images."""
        return sum(
            (
                self.patch * image.patches + self.patch_pair * image.patches * image.patches
                for sample in samples
                for image in sample.images
            ),
            0.0,
        )

    def to_dict(self) -> dict[str, float]:
        return asdict(self)
