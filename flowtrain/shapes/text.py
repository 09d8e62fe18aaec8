"""The backbone's sizes: decoder layers with grouped-query attention or a recurrent mixer, and a dense or expert MLP.

Numbers of a layer are of two kinds. *Weights* are in matrices and take part in one multiply-add for each token that
meets them; *vectors* (norms, biases, decays) do not. Parameters are both.

    layer  =  token mixer (attention | recurrent)  +  MLP (dense | router, experts, shared expert)  +  norms
    outer  =  embedding  +  vectors of the final norm  +  head, unless it is tied to the embedding
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mixer(StrEnum):
    """How the tokens of a layer see each other, always within their own sample."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts of the layers in `layers`, the others being dense.

    Attributes:
        experts: routed ones; `top_k` of them see a token.
        expert_width: inner width of one.
        shared_width: inner width of the experts that see every token, together; 0 without.
        layers: indexes of the layers that have experts.
        shared_gate: the shared expert's output is scaled by a gate of one column.
    """

    experts: int
    top_k: int
    expert_width: int
    layers: tuple[int, ...]
    shared_width: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.experts, self


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A mixer whose cost is linear in the tokens: projections, a short convolution, a state of fixed size.

    Attributes:
        weights: numbers in the matrices of one mixer.
        vectors: its other numbers.
        state_flops: forward FLOPs of the recurrence for one token, outside of the matrices.
    """

    weights: int
    vectors: int
    state_flops: int = 0


@dataclass(frozen=True, slots=True)
class TextShape:
    """The backbone.

    Attributes:
        mlp_width: inner width of the dense MLP, of three matrices (gated) or two.
        tied: the head is the embedding.
        norm_vectors: numbers in the norms of a layer; `attention_vectors`: biases and head norms of its attention;
            `mlp_vectors`: biases of a dense MLP; `outer_vectors`: numbers outside of layers and matrices.
        mixers: one a layer; empty: all full attention.
        window: tokens that `Mixer.WINDOW` sees, itself included.
        head_norms: queries and keys of a head are normed.
        output_gate: attention's output is scaled by one more projection of the width of the queries.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    tied: bool
    gated: bool = True
    norm_vectors: int = 0
    attention_vectors: int = 0
    mlp_vectors: int = 0
    outer_vectors: int = 0
    mixers: tuple[Mixer, ...] = ()
    window: int | None = None
    output_gate: bool = False
    head_norms: bool = False
    moe: MoeShape | None = None
    recurrent: RecurrentShape | None = None

    def __post_init__(self) -> None:
        assert not self.mixers or len(self.mixers) == self.layers, self
        assert self.window is not None or Mixer.WINDOW not in self.mixers, self
        assert self.recurrent is not None or Mixer.RECURRENT not in self.mixers, self
        assert self.moe is None or all(0 <= layer < self.layers for layer in self.moe.layers), self

    @property
    def attention_width(self) -> int:
        """Width of the queries of all heads: what the attention term of the FLOPs goes with."""
        return self.heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Matrices of one layer's attention."""
        return self.hidden * ((3 if self.output_gate else 2) * self.attention_width + 2 * self.kv_heads * self.head_dim)

    @property
    def mlp_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def layer_weights(self) -> int:
        """Matrices of a layer with attention and a dense MLP."""
        return self.attention_weights + self.mlp_weights

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def layers_with(self, mixer: Mixer) -> int:
        return self.mixers.count(mixer) if self.mixers else self.layers if mixer is Mixer.FULL else 0

    @property
    def attention_layers(self) -> int:
        return self.layers - self.layers_with(Mixer.RECURRENT)

    @property
    def expert_layers(self) -> int:
        return len(self.moe.layers) if self.moe else 0

    def attended_pairs(self, length: int) -> float:
        """Pairs of tokens that attend to each other in all layers of a sample, the causal mask taken off: ℓ²/2, and
        within a window of w < ℓ tokens w·ℓ - w²/2."""
        return sum(
            count * _causal_pairs(length, window) for count, window in self.attention_windows() if count and length
        )

    def attention_windows(self) -> tuple[tuple[int, int | None], ...]:
        """Numbers of layers by the window that they attend within (None: the whole sample)."""
        return ((self.layers_with(Mixer.FULL), None), (self.layers_with(Mixer.WINDOW), self.window))

    @property
    def token_weights(self) -> int:
        """Matrices of all layers that one token meets: of the experts, the `top_k` that see it."""
        return self._shared_weights + self.expert_layers * (self.moe.top_k if self.moe else 0) * self._expert_weights

    def layer_token_weights(self, layer: int) -> int:
        """Matrices of one layer that a token meets; over all layers they are `token_weights`."""
        recurrent = self.recurrent if self.mixers and self.mixers[layer] is Mixer.RECURRENT else None
        mixer = self.attention_weights if recurrent is None else recurrent.weights
        if self.moe is None or layer not in self.moe.layers:
            return mixer + self.mlp_weights
        return mixer + self.moe.top_k * self._expert_weights + self._shared_expert_weights

    def layer_pairs(self, layer: int, length: int) -> float:
        """Pairs of a sample's tokens that attend to each other in one layer; over all layers `attended_pairs`."""
        mixer = self.mixers[layer] if self.mixers else Mixer.FULL
        return (
            0.0 if mixer is Mixer.RECURRENT else _causal_pairs(length, self.window if mixer is Mixer.WINDOW else None)
        )

    @property
    def state_flops(self) -> int:
        """Forward FLOPs of one token in the recurrences of all layers."""
        return self.layers_with(Mixer.RECURRENT) * self.recurrent.state_flops if self.recurrent else 0

    @property
    def expert_parameters(self) -> int:
        """Of the routed experts of all layers."""
        return self.expert_layers * self.moe.experts * self._expert_weights if self.moe else 0

    @property
    def layer_parameters(self) -> int:
        """Of all layers together, without routed experts."""
        recurrent = self.layers_with(Mixer.RECURRENT) * self.recurrent.vectors if self.recurrent else 0
        vectors = self.layers * self.norm_vectors + self.attention_layers * self.attention_vectors
        vectors += (self.layers - self.expert_layers) * self.mlp_vectors
        return self._shared_weights + vectors + recurrent

    @property
    def outer_parameters(self) -> int:
        """Outside of the layers: embedding, final norm, head."""
        return (1 if self.tied else 2) * self.head_weights + self.outer_vectors

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.expert_parameters + self.outer_parameters

    @property
    def _expert_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.moe.expert_width if self.moe else 0

    @property
    def _shared_expert_weights(self) -> int:
        """Of a layer with experts: what every token meets instead of a dense MLP, the router included."""
        if self.moe is None:
            return 0
        return self.hidden * (
            (3 if self.gated else 2) * self.moe.shared_width + self.moe.experts + self.moe.shared_gate
        )

    @property
    def _shared_weights(self) -> int:
        """Matrices of all layers, without routed experts."""
        recurrent = self.layers_with(Mixer.RECURRENT) * self.recurrent.weights if self.recurrent else 0
        mlp = (self.layers - self.expert_layers) * self.mlp_weights
        mlp += self.expert_layers * self._shared_expert_weights
        return self.attention_layers * self.attention_weights + recurrent + mlp


def _causal_pairs(length: int, window: int | None) -> float:
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2
