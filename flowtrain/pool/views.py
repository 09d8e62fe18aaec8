"""Tensors over the bytes of a block: what `TensorSpec`s describe, without a copy.

    specs, payload bytes ──▶ pieces_of: checked and worked out once for each shape of block, then looked up
                                │
          views ◀───────────────┴──────────────▶ SegmentTensors.of
          each with a storage of its own          all of one storage, half the time

The second kind is for the owner's own reads and writes. A reader's tensors go into autograd, which counts writes by
storage: a write into one block must not count as a change of another that it has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch

from flowtrain.pool.block import HEADER_BYTES
from flowtrain.types import TensorSpec


class Piece(NamedTuple):
    """One tensor of a block: where it starts behind the block's first byte, and its form in elements."""

    dtype: torch.dtype
    itemsize: int
    num_elements: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def pieces_of(specs: tuple[TensorSpec, ...], payload_bytes: int) -> tuple[Piece, ...]:
    """The tensors of a block; each lies within the payload, at a multiple of its element."""
    pieces = []
    for spec in specs:
        dtype, count = dtype_of(spec), prod(spec.shape)
        assert spec.offset % dtype.itemsize == 0, f"{spec} starts within an element"
        assert spec.offset + count * dtype.itemsize <= payload_bytes, (
            f"{spec} ends past its payload of {payload_bytes} bytes"
        )
        strides = tuple(prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape)))
        pieces.append(Piece(dtype, dtype.itemsize, count, HEADER_BYTES + spec.offset, spec.shape, strides))
    return tuple(pieces)


def views(memory: memoryview, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[torch.Tensor]:
    """One tensor for each spec over the block's bytes, each with its own storage; `memory` starts at the header."""
    tensors = []
    for dtype, _, count, start, shape, _ in pieces_of(specs, payload_bytes):
        if not count:
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        tensors.append(flat if len(shape) == 1 else flat.view(*shape))
    return tensors


class SegmentTensors:
    """Tensors over a whole segment, one for each dtype, and those of its blocks as parts of them."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._whole: dict[torch.dtype, torch.Tensor] = {}

    def of(self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[torch.Tensor]:
        """One tensor for each spec of the block whose header starts at byte `start` of the segment."""
        tensors = []
        for dtype, itemsize, _, at, shape, strides in pieces_of(specs, payload_bytes):
            whole = self._whole.get(dtype)
            if whole is None:
                count = self._memory.nbytes // itemsize
                whole = self._whole[dtype] = torch.frombuffer(self._memory, dtype=dtype, count=count)
            tensors.append(whole.as_strided(shape, strides, (start + at) // itemsize))
        return tensors

    def close(self) -> None:
        """Let go of the memory; it ends with the last of the tensors."""
        self._whole.clear()
        self._memory = memoryview(b"")


def copy_over(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], what: str, position: int) -> None:
    """Copy tensors over those of a block, cast to their dtype; gradients are to be off."""
    for target, tensor in zip(targets, tensors, strict=True):
        assert tensor.shape == target.shape, (
            f"{what} of position {position} have shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
        )
        target.copy_(tensor)


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} is no dtype of torch"
    return dtype


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return _dtype(spec.dtype)
