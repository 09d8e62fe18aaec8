"""Tensors over the bytes of a block: what `TensorSpec`s describe, without a copy.

    specs, payload bytes ──▶ pieces_of: checked and worked out once for each shape of block, then looked up
                                │
          views ◀───────────────┴──────────────▶ SegmentTensors.of
          each with a storage of its own          all of one storage, half the time

The second kind is for the owner's own reads and writes. A reader's tensors go into autograd, which counts writes by
storage: a write into one block must not count as a change of another that it has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch

from flowtrain.pool.arrays import Copy, OwnArrays
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


@lru_cache(maxsize=4096)
def stack_of(specs: tuple[TensorSpec, ...], payload_bytes: int) -> Piece | None:
    """The tensors of a block as one with an axis in front, where they are alike and at equal distances: one look at all
    of them takes half the time of one at each. None where there is only one, or they differ."""
    first, *others = pieces_of(specs, payload_bytes)
    if (
        not others
        or not first.num_elements
        or any(piece[:3] != first[:3] or piece.shape != first.shape for piece in others)
    ):
        return None
    step = others[0].start - first.start
    if step % first.itemsize or any(b.start - a.start != step for a, b in zip([first, *others], others, strict=False)):
        return None
    strides = (step // first.itemsize, *first.strides)
    reach = (len(others) * step) // first.itemsize + first.num_elements
    return first._replace(num_elements=reach, shape=(len(specs), *first.shape), strides=strides)


def views(memory: memoryview, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[torch.Tensor]:
    """One tensor for each spec over the block's bytes, each with its own storage; `memory` starts at the header."""
    stack = stack_of(specs, payload_bytes) if len(specs) > 1 else None
    if stack is not None:
        flat = torch.frombuffer(memory, dtype=stack.dtype, count=stack.num_elements, offset=stack.start)
        return [*flat.as_strided(stack.shape, stack.strides).unbind()]
    tensors = []
    for dtype, _, count, start, shape, _ in pieces_of(specs, payload_bytes):
        if not count:
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        tensors.append(flat if len(shape) == 1 else flat.view(shape))
    return tensors


class SegmentTensors:
    """Tensors over a whole segment, one for each dtype, and those of its blocks as parts of them."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._whole: dict[torch.dtype, torch.Tensor] = {}

    def of(self, start: int, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[torch.Tensor]:
        """One tensor for each spec of the block whose header starts at byte `start` of the segment."""
        stack = stack_of(specs, payload_bytes) if len(specs) > 1 else None
        if stack is not None:
            return [*self._piece(start, stack).unbind()]
        return [self._piece(start, piece) for piece in pieces_of(specs, payload_bytes)]

    def fill(
        self,
        start: int,
        specs: tuple[TensorSpec, ...],
        payload_bytes: int,
        tensors: Sequence[torch.Tensor],
        position: int,
    ) -> None:
        """Copy these tensors into the block at `start`, cast to its dtypes; none of it is part of a graph."""
        values = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        for value, spec in zip(values, specs, strict=True):
            _check_shape(value, spec.shape, "features", position)
        stack = stack_of(specs, payload_bytes) if len(specs) > 1 else None
        if stack is not None:
            torch.stack(values, out=self._piece(start, stack))
            return
        for value, piece in zip(values, pieces_of(specs, payload_bytes), strict=True):
            self._piece(start, piece).copy_(value)

    def _piece(self, start: int, piece: Piece) -> torch.Tensor:
        whole = self._whole.get(piece.dtype)
        if whole is None:
            count = self._memory.nbytes // piece.itemsize
            whole = self._whole[piece.dtype] = torch.frombuffer(self._memory, dtype=piece.dtype, count=count)
        return whole.as_strided(piece.shape, piece.strides, (start + piece.start) // piece.itemsize)

    def close(self) -> None:
        """Let go of the memory; it ends with the last of the tensors."""
        self._whole.clear()
        self._memory = memoryview(b"")


class TorchArrays:
    """Payloads as tensors; implements `flowtrain.pool.arrays.Arrays`."""

    def own(self, memory: memoryview) -> OwnArrays:
        return SegmentTensors(memory)

    def views(self, memory: memoryview, specs: tuple[TensorSpec, ...], payload_bytes: int) -> list[torch.Tensor]:
        return views(memory, specs, payload_bytes)

    def copy(self, copies: Iterable[Copy]) -> None:
        """All of them in one call: what a call costs is paid once for a whole unit or pack."""
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for position, targets, sources in copies:
            for target, source in zip(targets, sources, strict=True):
                assert source.dtype == target.dtype, (
                    f"gradient of position {position} is {source.dtype}, expected {target.dtype}"
                )
                _check_shape(source, target.shape, "gradients", position)
            into += targets
            values += sources
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, values)


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...], what: str, position: int) -> None:
    assert tensor.shape == shape, (
        f"{what} of position {position} have shape {tuple(tensor.shape)}, expected {(*shape,)}"
    )


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} is no dtype of torch"
    return dtype


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return _dtype(spec.dtype)
