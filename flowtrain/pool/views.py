"""Tensors over the bytes of a block: what `TensorSpec`s describe, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch

from flowtrain.pool.block import HEADER_BYTES
from flowtrain.types import TensorSpec


def views(memory: memoryview, specs: Sequence[TensorSpec], payload_bytes: int) -> list[torch.Tensor]:
    """One tensor for each spec over the block's bytes; `memory` starts at its header.

    Each has a storage of its own, so that a write into one block does not count as a change of another that autograd
    has saved.
    """
    tensors = []
    for spec in specs:
        dtype, count = _dtype(spec.dtype), prod(spec.shape)
        assert spec.offset + count * dtype.itemsize <= payload_bytes, (
            f"{spec} ends past its payload of {payload_bytes} bytes"
        )
        if not count:
            tensors.append(torch.empty(spec.shape, dtype=dtype))
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=HEADER_BYTES + spec.offset)
        tensors.append(flat if len(spec.shape) == 1 else flat.view(spec.shape))
    return tensors


def copy_into(
    memory: memoryview,
    specs: Sequence[TensorSpec],
    payload_bytes: int,
    tensors: Sequence[torch.Tensor],
    what: str,
    position: int,
) -> None:
    """Copy tensors over the block's payload, cast to the dtype of their spec."""
    for view, tensor, spec in zip(views(memory, specs, payload_bytes), tensors, specs, strict=True):
        assert tensor.shape == view.shape, (
            f"{what} of position {position} have shape {tuple(tensor.shape)}, expected {spec.shape}"
        )
        view.copy_(tensor.detach() if tensor.requires_grad else tensor)


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} is no dtype of torch"
    return dtype


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return _dtype(spec.dtype)
