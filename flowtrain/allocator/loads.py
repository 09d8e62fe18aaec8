"""Modules of a model with the work of a mean sample: what the solver reads, from shape and data (pure).

FLOPs are those of `flowtrain.flops`, taken over the samples of `DataStats`. An encoder of a modality that the data lack
is left out: it needs no devices. The projector goes with the side of the cut where it runs (contract C4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flowtrain.allocator.load import Floats, Integers, ModuleLoad
from flowtrain.allocator.stats import DataStats
from flowtrain.flops import patch_flops
from flowtrain.shapes import DTYPE_BYTES, EncoderShape, ModelShape
from flowtrain.types import Cut, Module, Role


def loads_of(
    shape: ModelShape, stats: DataStats, frozen: frozenset[Module], dtype: str, replayed: bool = False
) -> tuple[ModuleLoad, ...]:
    """The encoders that the data use, then the backbone. `replayed`: encoders run again before their backward."""
    before = Cut.of(frozen) is Cut.BEFORE_PROJECTOR
    found = []
    carried = 0.0
    for encoder in shape.encoders:
        tokens, sample = _pieces(encoder, stats)
        if tokens.sum():
            load = _encoder(encoder, tokens, sample, stats, frozen, before, dtype)
            load = replace(load, replayed=replayed and load.needs_backward)
            carried += load.pool_bytes
            found.append(load)
    return (*found, _backbone(shape, stats, frozen, before, carried))


def unused_encoders(shape: ModelShape, stats: DataStats) -> list[str]:
    return [encoder.name for encoder in shape.encoders if not _pieces(encoder, stats)[0].sum()]


def _pieces(encoder: EncoderShape, stats: DataStats) -> tuple[Integers, Integers]:
    """Tokens of each image or clip, and the sample it belongs to."""
    if encoder.modality == "vision":
        return stats.image_tokens, stats.image_sample
    with_sound = np.flatnonzero(stats.audio_tokens)
    return stats.audio_tokens[with_sound], with_sound


def _encoder(
    encoder: EncoderShape,
    tokens: Integers,
    sample: Integers,
    stats: DataStats,
    frozen: frozenset[Module],
    before: bool,
    dtype: str,
) -> ModuleLoad:
    num = len(stats)
    patches = tokens * encoder.projector.patches_per_token
    rows = _over(patches, lambda p: float(encoder.rows(p)))
    linear = 2.0 * encoder.token_weights * rows
    attention = 4.0 * encoder.attention_width * _over(patches, encoder.attended_pairs)
    outer = patch_flops(encoder) * patches
    projector = encoder.projector
    if not before:
        outer = outer + 2.0 * projector.weights * tokens
    by_sample = np.bincount(sample, weights=linear + attention + outer, minlength=num)
    rows_by_sample = np.bincount(sample, weights=rows, minlength=num)
    trains, projector_trains = Module.ENCODER not in frozen, Module.PROJECTOR not in frozen and not before
    passes = 3 if trains else 1
    outer_parameters = encoder.outer_parameters + (0 if before else projector.parameters)
    trained = (encoder.parameters if trains else 0) + (projector.parameters if projector_trains else 0)
    width = encoder.hidden if before else projector.width_out * projector.num_mergers
    crossing = patches.sum() if before else tokens.sum()
    return ModuleLoad(
        name=encoder.name,
        role=Role.PRODUCER,
        layers=encoder.layers,
        hidden=encoder.hidden,
        heads=encoder.heads,
        kv_heads=encoder.heads,
        head_dim=max(1, encoder.attention_width // encoder.heads),
        mlp_width=encoder.mlp_width,
        gated=encoder.gated,
        vocab=0,
        layer_parameters=encoder.layer_parameters,
        outer_parameters=outer_parameters,
        trained_parameters=trained,
        tokens=float(rows.sum()) / num,
        longest_tokens=int(rows_by_sample.max()),
        linear_flops=float(linear.sum()) / num,
        attention_flops=float(attention.sum()) / num,
        outer_flops=float(outer.sum()) / num,
        linear_passes=passes,
        attention_passes=passes,
        share=len(np.unique(sample)) / num,
        spread=float(by_sample.std() / by_sample.mean()),
        pool_bytes=float(crossing) * width * DTYPE_BYTES[dtype] / num,
        gradient_returns=trained > 0,
    )


def _backbone(
    shape: ModelShape, stats: DataStats, frozen: frozenset[Module], before: bool, carried: float
) -> ModuleLoad:
    text = shape.text
    lengths = stats.lengths
    num = len(stats)
    tokens = float(lengths.mean())
    projectors = [encoder.projector for encoder in shape.encoders] if before else []
    outer = 2.0 * text.head_weights * float(stats.trained_tokens.mean())
    outer += sum(2.0 * projector.weights for projector in projectors) * float(stats.vision_tokens.mean())
    trains = Module.BACKBONE not in frozen
    flows = Module.ENCODER not in frozen or Module.PROJECTOR not in frozen
    linear_passes, attention_passes = (3, 3) if trains else (2, 3) if flows else (1, 1)
    more = sum(projector.parameters for projector in projectors)
    moe = text.moe
    return ModuleLoad(
        name="backbone",
        role=Role.CONSUMER,
        layers=text.layers,
        hidden=text.hidden,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        mlp_width=text.mlp_width,
        gated=text.gated,
        vocab=text.vocab,
        layer_parameters=text.layer_parameters,
        outer_parameters=text.outer_parameters + more,
        trained_parameters=(text.parameters if trains else 0) + more,
        tokens=tokens,
        longest_tokens=int(lengths.max()),
        linear_flops=(2.0 * text.token_weights + text.state_flops) * tokens,
        attention_flops=4.0 * text.attention_width * float(_over(lengths, text.attended_pairs).sum()) / num,
        outer_flops=outer,
        linear_passes=linear_passes,
        attention_passes=attention_passes,
        pool_bytes=carried,
        gradient_returns=False,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_width=moe.expert_width if moe else 0,
        expert_layers=text.expert_layers,
        expert_parameters=text.expert_parameters,
        head_norms=text.head_norms,
        head_tokens=float(stats.trained_tokens.mean()),
    )


def _over(sizes: Integers, function: Callable[[int], float]) -> Floats:
    """The function of every size; each distinct size is asked once."""
    distinct, place = np.unique(sizes, return_inverse=True)
    values: Floats = np.array([function(int(size)) for size in distinct], dtype=np.float64)[place]
    return values
