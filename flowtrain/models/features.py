"""From what the processor returns to the features of each sample, and from features to what `forward` takes.

    processor's tensors of each sample ─▶ get_image_features ─▶ pooled output, deep-stack levels ─▶ features by sample
    features of a pack's samples ─▶ {"image": …} ─▶ forward(mm_encoder_outputs=…)

Which tensors the encoder is called with is read off the signature of `get_image_features`. Samples share a call where
nothing but patches or tiles can be laid end to end, so that small images fill it; where a row's images depend on each
other (tiles padded to the longest, sizes by row) every sample has a call of its own.

Shapes: T visual tokens, D feature width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

Inputs = Mapping[str, torch.Tensor]
Features = tuple[torch.Tensor, ...]
GRIDS = "image_grid_thw"
PIXELS = "pixel_values"


def accepted_inputs(model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Those of the processor's tensors that the encoder is called with."""
    names = inspect.signature(model.get_image_features).parameters
    return {name: tensor for name, tensor in inputs.items() if name in names}


def can_share_call(inputs: Sequence[Inputs]) -> bool:
    """Whether the tensors of several samples may be laid end to end along their first dim."""
    names = inputs[0].keys()
    if names == {PIXELS, GRIDS}:
        return True
    return names == {PIXELS} and len({s[PIXELS].shape[1:] for s in inputs}) == 1 and inputs[0][PIXELS].dim() == 4


def encode_samples(inputs: Sequence[Inputs], encode: Callable[[dict[str, torch.Tensor]], Features]) -> list[Features]:
    """Features of each sample by one call of `encode`, split, or by a call for each."""
    if len(inputs) == 1 or not can_share_call(inputs):
        return [encode(dict(sample)) for sample in inputs]
    whole = encode({name: torch.cat([sample[name] for sample in inputs]) for name in inputs[0]})
    sizes = [_size(sample) for sample in inputs]
    return list(zip(*(tensor.split(_shares(len(tensor), sizes)) for tensor in whole), strict=True))


def _size(sample: Inputs) -> int:
    """Patches or tiles of a sample: its share of a call."""
    return int(sample[GRIDS].prod(-1).sum()) if GRIDS in sample else len(sample[PIXELS])


def _shares(rows: int, sizes: Sequence[int]) -> list[int]:
    total = sum(sizes)
    shares = [rows * size // total for size in sizes]
    assert sum(shares) == rows, f"{rows} rows of features do not divide by samples of {sizes}"
    return shares


def projected(model: Any, inputs: Inputs) -> Features:
    """`get_image_features` as (T, D) tensors: the pooled output, then the deep-stack levels where there are any."""
    output = model.get_image_features(**inputs)
    return tuple(_flat(level) for level in (output.pooler_output, *(getattr(output, "deepstack_features", None) or ())))


def _flat(level: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Images as a list, as rows of one dim or of two, become (T, D)."""
    pieces = [level] if isinstance(level, torch.Tensor) else list(level)
    flat = [piece.reshape(-1, piece.shape[-1]) for piece in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class _OneTensor(tuple[torch.Tensor]):
    """A tuple of one tensor for families that join a list of images, and that tensor for those that place it whole."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self[0].to(*args, **kwargs)


@dataclass
class VisualFeatures(ModelOutput):
    """What `forward` reads of an encoder's output."""

    pooler_output: Any = None
    deepstack_features: Any = None


def encoder_outputs(features: Features) -> dict[str, Any]:
    """What `forward` takes as `mm_encoder_outputs`, for all samples of a pack."""
    pooled_TD, *levels = features
    deepstack = [_OneTensor((level_TD,)) for level_TD in levels] or None
    return {"image": VisualFeatures(_OneTensor((pooled_TD,)), deepstack)}
