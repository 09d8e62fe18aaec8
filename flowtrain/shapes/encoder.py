"""An encoder's sizes, vision or audio, with the projector that carries its output into the backbone's width.

    pixels ─patch embedding─▶ patches ─layers─▶ patches ─projector─▶ tokens
    sound  ─convolutions────▶ frames  ─layers─▶ frames  ─projector─▶ tokens        (a frame counts as a patch)

Attention runs within an image (a clip), within a tile where an image is cut into tiles of fixed size, and in windowed
layers within a window. Each tile, or image, may carry `class_tokens` more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Modality = Literal["vision", "audio"]


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """From `patches_per_token` patches of the encoder to one token of the backbone, on `num_mergers` levels.

    Attributes:
        num_mergers: feature tensors that cross the cut; more than one where deep layers are fed too.
        width_out: width of a token.
        weights: numbers in matrices; each takes part in one multiply-add a token.
        vectors: norms, biases, separators.
    """

    num_mergers: int
    patches_per_token: int
    width_out: int
    weights: int
    vectors: int

    @property
    def parameters(self) -> int:
        return self.weights + self.vectors


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """One encoder and its projector.

    Attributes:
        name: its section in config.json, without `_config`.
        gated: its MLP has three matrices.
        patch_values: numbers of a patch as the processor gives it.
        embed_weights: matrices in front of the layers; `embed_products`: multiply-adds that they take for a patch,
            where that is another number (a convolution that runs more than once a patch).
        layer_vectors: numbers of a layer outside of its matrices; `outer_vectors`: the same outside of the layers,
            learned positions included.
        exit_weights: matrices behind the layers, per token (a strided convolution over a token's patches).
        idle_layers: the last layers, whose output the projector does not read; they make no FLOPs that count.
        idle_weights: other matrices that the language model does not need (a pooling head).
        full_layers: layers that attend within a whole image or tile; the others within `window_patches`.
        tile_patches: patches of a tile; None where an image is encoded whole.
        attention_width: width of the queries of all heads.
    """

    name: str
    modality: Modality
    hidden: int
    layers: int
    heads: int
    attention_width: int
    mlp_width: int
    gated: bool
    patch_values: int
    embed_weights: int
    layer_vectors: int
    outer_vectors: int
    full_layers: int
    projector: ProjectorShape
    window_patches: int | None = None
    tile_patches: int | None = None
    class_tokens: int = 0
    embed_products: int | None = None
    exit_weights: int = 0
    idle_layers: int = 0
    idle_weights: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.idle_layers <= self.full_layers <= self.layers, self
        assert self.full_layers == self.layers or self.window_patches, self

    @property
    def layer_weights(self) -> int:
        """Matrices of one layer."""
        return 4 * self.hidden * self.attention_width + (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def token_weights(self) -> int:
        """Matrices of all layers that a row goes through."""
        return (self.layers - self.idle_layers) * self.layer_weights

    @property
    def layer_parameters(self) -> int:
        """Of all layers together."""
        return self.layers * (self.layer_weights + self.layer_vectors)

    @property
    def outer_parameters(self) -> int:
        """Outside of the layers, without the projector."""
        return self.embed_weights + self.exit_weights + self.idle_weights + self.outer_vectors

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.outer_parameters

    def tiles(self, patches: int) -> Iterator[int]:
        """Patches of each piece of an image that attends within itself.

        >>> list(shape.tiles(20))     # tiles of 16
        [16, 4]
        """
        tile = self.tile_patches or patches
        while patches > 0:
            yield min(tile, patches)
            patches -= tile

    def rows(self, patches: int) -> int:
        """Rows that go through the layers for an image: its patches and the class tokens."""
        return sum(tile + self.class_tokens for tile in self.tiles(patches))

    def attended_pairs(self, patches: int) -> int:
        """Pairs of rows that attend to each other in all layers, for one image."""
        pairs = 0
        for tile in self.tiles(patches):
            rows = tile + self.class_tokens
            pairs += (self.full_layers - self.idle_layers) * rows * rows
            pairs += (self.layers - self.full_layers) * rows * min(rows, self.window_patches or rows)
        return pairs
