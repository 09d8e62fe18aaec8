"""Predicted time of samples on both sides, in whole numbers: linear in tokens and patches, quadratic within a sample.

    pack_cost    pack + Σ samples  token · ℓ + token_pair · pairs(ℓ) + trained_token · t + projected_patch · p
    encode_cost         Σ samples  patch · p + patch_pair · patch_pairs

ℓ tokens, t trained tokens, p patches; pairs(ℓ) is ℓ² a layer, and s · (2ℓ - s) in a layer that attends within a window
of s < ℓ tokens (twice the pairs under the causal mask); those of patches come with the sample. Two packs of equal
length differ by Σℓ²: one long sample costs more than many short ones. `pack` is what a pack with samples costs beside
them, `unit` what an encoder call does (`unit_cost`).

Whole numbers make every comparison and sum exact, so that all who compose agree bit for bit (contract C1):

    real coefficient ──× 2^exponent, rounded once──▶ integer coefficient ──sums──▶ ≫ SHIFT ──▶ cost of a sample

The exponent gives the coefficient of one token 60 bits, so a token costs about 2^20 units: one part in a million is
resolved for the shortest sample, a coefficient 2^-40 of that still counts, and a step's costs stay within 53 bits.
A cost is a number of one model's own units: compare and add costs of one model only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.flops import encoder_terms
from flowtrain.shapes import Mixer, ModelShape
from flowtrain.types import Cut, Module, SampleMeta

COEFFICIENT_BITS = 60
LIMB = 20
LIMB_MASK = (1 << LIMB) - 1
SHIFT = 2 * LIMB

MOST_MULTIPLIED = 1 << 40
"""Below it, four products with a limb and their carry fit 63 bits."""

MOST_SQUARED = 1 << 26
"""Tokens below whose square, over a thousand layers, does."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Integer coefficients as above, in 2^-exponent of what they were given in; they stand in the decision log.

    Attributes:
        token: of one token on the backbone.
        token_pair: of one of pairs(ℓ).
        trained_token: of one token with a label (the head is computed there).
        projected_patch: of one patch where the projector runs on the backbone's side.
        patch: of one patch on the encoder.
        patch_pair: of one pair of patches that attend to each other in one layer.
        pack: of a pack that has samples, whatever they are.
        unit: of an encoder call, whatever it encodes.
        full_layers: backbone layers whose attention spans a sample; `windowed_layers`: a window of `window_tokens`.
        exponent: a coefficient c was given as c / 2^exponent.
    """

    token: int
    token_pair: int
    trained_token: int
    projected_patch: int
    patch: int
    patch_pair: int
    pack: int
    unit: int
    full_layers: int
    windowed_layers: int
    window_tokens: int
    exponent: int

    @classmethod
    def from_coefficients(
        cls,
        token: float,
        token_pair: float = 0.0,
        trained_token: float = 0.0,
        projected_patch: float = 0.0,
        patch: float = 0.0,
        patch_pair: float = 0.0,
        pack: float = 0.0,
        unit: float = 0.0,
        full_layers: int = 1,
        windowed_layers: int = 0,
        window_tokens: int = 0,
    ) -> CostModel:
        """Quantised once; any unit will do (FLOPs, seconds, tokens) as long as it is the same for all.

        CostModel.from_coefficients(token=1.0, token_pair=2.05e-5)      # in tokens: a 7B model's attention share
        """
        real = (token, token_pair, trained_token, projected_patch, patch, patch_pair, pack, unit)
        assert all(math.isfinite(value) and value >= 0 for value in real), f"coefficients {real}"
        assert max(real) > 0, "a model that finds everything free can balance nothing"
        exponent = COEFFICIENT_BITS - math.frexp(token or max(real))[1]
        return cls(
            token=_scaled(token, exponent),
            token_pair=_scaled(token_pair, exponent),
            trained_token=_scaled(trained_token, exponent),
            projected_patch=_scaled(projected_patch, exponent),
            patch=_scaled(patch, exponent),
            patch_pair=_scaled(patch_pair, exponent),
            pack=_scaled(pack, exponent),
            unit=_scaled(unit, exponent),
            full_layers=full_layers,
            windowed_layers=windowed_layers,
            window_tokens=window_tokens,
            exponent=exponent,
        )

    @classmethod
    def from_shape(
        cls, shape: ModelShape, frozen: frozenset[Module], cut: Cut, attention_efficiency: float = 1.0
    ) -> CostModel:
        """From the FLOPs of the modules; the projector counts on the side of the cut where it runs.

        `attention_efficiency`: share of a matrix product's speed that the attention kernel reaches. A coefficient
        counts the passes that its part makes (forward, activations, weights), which freezing sets.
        """
        encoder_trains, projector_trains = Module.ENCODER not in frozen, Module.PROJECTOR not in frozen
        encoder_passes = 3 if encoder_trains else 1
        projector_passes = 3 if projector_trains else 2 if encoder_trains else 1
        # A whole pack goes through the graph, so one sample with images makes the backward of all its neighbours.
        flows = encoder_trains or projector_trains
        linear_passes, pair_passes = (3, 3) if Module.BACKBONE not in frozen else (2, 3) if flows else (1, 1)
        text, vision = shape.text, shape.vision
        linear, pair = encoder_terms(vision)
        projector = projector_passes * 2.0 * shape.projector.weights / shape.projector.patches_per_token
        after = cut is Cut.AFTER_PROJECTOR
        return cls.from_coefficients(
            token=linear_passes * (2.0 * text.token_weights + text.state_flops),
            token_pair=pair_passes * 2.0 * text.attention_width / attention_efficiency,
            trained_token=linear_passes * 2.0 * text.head_weights,
            projected_patch=0.0 if after else projector,
            patch=encoder_passes * linear + (projector if after else 0.0),
            patch_pair=encoder_passes * pair / attention_efficiency,
            full_layers=text.layers_with(Mixer.FULL),
            windowed_layers=text.layers_with(Mixer.WINDOW),
            window_tokens=text.window or 0,
        )

    @classmethod
    def reference(cls) -> CostModel:
        """FLOPs of a trained 7B backbone and 0.67B encoder, for traces that come without a model.

        28 layers of 28 heads of 128, counted as one, 7.07e9 matrix weights; encoder of 32 layers of width 1280; matrix
        products at 65 % of peak, attention at 45 %. One token squared is 2.05e-5 of a token.
        """
        efficiency = 0.45 / 0.65
        return cls.from_coefficients(
            token=6 * 7.07e9,
            token_pair=6 * 28 * 28 * 128 / efficiency,
            patch=6 * 32 * (4 * 1280**2 + 3 * 1280 * 3420),
            patch_pair=3 * 4 * 1280 / efficiency,
        )

    # --- costs --------------------------------------------------------------------------------------------------------

    def sample_cost(self, sample: SampleMeta) -> int:
        """Backbone side, one sample."""
        length = self.length_product(sample.tokens)
        return (length + self.trained_token * sample.trained_tokens + self.projected_patch * sample.patches) >> SHIFT

    def pack_cost(self, samples: Iterable[SampleMeta]) -> int:
        """Backbone side; `fixed` and a sum over the samples of a pack, since none of them sees another."""
        costs = [self.sample_cost(sample) for sample in samples]
        return self.fixed + sum(costs) if costs else 0

    def sample_costs(self, lengths: Ints, trained: Ints, patches: Ints) -> Ints:
        """`sample_cost` of many: their tokens, trained tokens and patches."""
        tokens = lengths if lengths.max(initial=0) < MOST_SQUARED else lengths.astype(object)
        pairs = self._pairs(tokens, np.minimum(tokens, self.window_tokens))
        coefficients = self.token, self.token_pair, self.trained_token, self.projected_patch
        return _shifted_sums(zip(coefficients, (lengths, pairs, trained, patches), strict=True))

    def encode_costs(self, patches: Ints, patch_pairs: Ints) -> Ints:
        """`encode_cost` of many samples, each by itself."""
        return _shifted_sums(zip((self.patch, self.patch_pair), (patches, patch_pairs), strict=True))

    @property
    def fixed(self) -> int:
        """What a pack with samples costs beside them."""
        return self.pack >> SHIFT

    def length_cost(self, tokens: int) -> int:
        """Backbone side, one sample of which only the length is known."""
        return self.length_product(tokens) >> SHIFT

    def length_product(self, tokens: int) -> int:
        """`length_cost` before it is shifted, so that what a sample costs beside can be added."""
        return self.token * tokens + self.token_pair * self.token_pairs(tokens)

    def encode_cost(self, samples: Iterable[SampleMeta]) -> int:
        """Encoder side; additive over samples, whatever they share a call with."""
        return sum((self.patch * sample.patches + self.patch_pair * sample.patch_pairs) >> SHIFT for sample in samples)

    def unit_cost(self, samples: Iterable[SampleMeta]) -> int:
        """Encoder side, one call that encodes these samples."""
        cost = self.encode_cost(samples)
        return cost + self.call if cost else 0

    @property
    def call(self) -> int:
        """What an encoder call costs beside its images."""
        return self.unit >> SHIFT

    def token_pairs(self, tokens: int) -> int:
        """Twice the pairs of tokens of a sample that attend to each other under the causal mask, over all layers."""
        return int(self._pairs(tokens, min(tokens, self.window_tokens)))

    def _pairs(self, tokens: Any, span: Any) -> Any:
        """Of a number of tokens, or of an array; `span`: of them, those that a layer with a window sees."""
        return self.full_layers * tokens * tokens + self.windowed_layers * span * (2 * tokens - span)

    def real(self, cost: int) -> float:
        """A cost in the unit in which the coefficients were given."""
        return math.ldexp(cost, SHIFT - self.exponent)

    def coefficients(self) -> dict[str, float]:
        """The real coefficients, for `from_coefficients`."""
        names = ("token", "token_pair", "trained_token", "projected_patch", "patch", "patch_pair", "pack", "unit")
        return {name: math.ldexp(getattr(self, name), -self.exponent) for name in names}

    # --- the decision log ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CostModel:
        """What `to_dict` gave; KeyError or TypeError when it is something else."""
        return cls(**{name: int(fields[name]) for name in cls.__dataclass_fields__})


def reference_pairs(patches: int) -> int:
    """Pairs of patches of an image that attend to each other in the encoder of `CostModel.reference`: 4 layers attend
    within the image, 28 within windows of 64 patches."""
    return patches * (4 * patches + 28 * min(patches, 64))


def _shifted_sums(terms: Iterable[tuple[int, npt.NDArray[Any]]]) -> Ints:
    """Σ coefficient · number ≫ SHIFT of each place of the columns, exactly, though products take more than 64 bits.

    A coefficient is cut into limbs of `LIMB` bits, so that sums of products with each limb fit; a column with numbers
    too large even for that is one of Python's integers.
    """
    low: Any = 0
    middle: Any = 0
    high: Any = 0
    for coefficient, numbers in terms:
        column = numbers if numbers.max(initial=0) < MOST_MULTIPLIED else numbers.astype(object)
        low = low + (coefficient & LIMB_MASK) * column
        middle = middle + (coefficient >> LIMB & LIMB_MASK) * column
        high = high + (coefficient >> 2 * LIMB) * column
    sums: Ints = (high + (middle + (low >> LIMB) >> LIMB)).astype(np.int64)
    return sums


def _scaled(value: float, exponent: int) -> int:
    """`value` · 2^exponent to the nearest integer, exactly: a float is a whole number over a power of two."""
    numerator, denominator = value.as_integer_ratio() if value else (0, 1)
    numerator, denominator = numerator << max(exponent, 0), denominator << max(-exponent, 0)
    return (2 * numerator + denominator) // (2 * denominator)
