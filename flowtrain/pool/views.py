"""Tensors over the bytes of a block: what `TensorSpec`s describe, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
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
        dtype, count = dtype_of(spec), prod(spec.shape)
        assert spec.offset + count * dtype.itemsize <= payload_bytes, (
            f"{spec} ends past its payload of {payload_bytes} bytes"
        )
        if not count:
            tensors.append(torch.empty(spec.shape, dtype=dtype))
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=HEADER_BYTES + spec.offset)
        tensors.append(flat.view(spec.shape))
    return tensors


def copy_into(
    memory: memoryview, specs: Sequence[TensorSpec], payload_bytes: int, tensors: Sequence[torch.Tensor], what: str
) -> None:
    """Copy tensors over the block's payload, cast to the dtype of their spec."""
    for view, tensor, spec in zip(views(memory, specs, payload_bytes), tensors, specs, strict=True):
        assert tensor.shape == view.shape, f"{what} have shape {tuple(tensor.shape)}, expected {spec.shape}"
        view.copy_(tensor.detach())


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    assert isinstance(dtype, torch.dtype), f"{spec.dtype!r} is no dtype of torch"
    return dtype
