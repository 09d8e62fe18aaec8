"""Where the feature tensors of a sample lie in its block of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flowtrain.types import FeatureSpec, TensorSpec

ALIGNMENT = 64
"""Tensors of a block start at multiples of this many bytes: a cache line."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def feature_specs(features: Sequence[FeatureSpec], dtype: str, tokens: int, patches: int) -> tuple[TensorSpec, ...]:
    """Where each feature tensor of a sample lies in its block.

    >>> feature_specs((FeatureSpec("token", 3), FeatureSpec("token", 3)), "float32", tokens=2, patches=8)
    (TensorSpec(offset=0, shape=(2, 3), dtype='float32'), TensorSpec(offset=64, shape=(2, 3), dtype='float32'))
    """
    specs, end = [], 0
    for feature in features:
        spec = TensorSpec(_aligned(end), (feature.num_rows(tokens, patches), feature.width), dtype)
        specs.append(spec)
        end = spec.offset + _tensor_bytes(spec)
    return tuple(specs)


def payload_bytes(features: Sequence[FeatureSpec], dtype: str, tokens: int, patches: int) -> int:
    """Bytes of a sample's payload: the end of its last tensor, rounded up to whole cache lines."""
    specs = feature_specs(features, dtype, tokens, patches)
    return _aligned(specs[-1].offset + _tensor_bytes(specs[-1])) if specs else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]
