"""What a rank holds of a tensor that may be cut over a mesh: a plain tensor is whole, a DTensor has a piece here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flowtrain.parallel.mesh import Axis

Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box in a tensor: where it begins and how far it goes, in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def overlap(self, other: Region) -> Region:
        """What both have in common; empty where that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        mine, theirs = self._ends(), other._ends()
        return Region(starts, tuple(max(0, min(ends) - s) for s, *ends in zip(starts, mine, theirs, strict=True)))

    def within(self, outer: Region) -> Region:
        """The same box, counted from the beginning of one around it."""
        return Region(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor, and where it lies in what a rank holds of it."""

    whole: Region
    own: Region

    @classmethod
    def number(cls) -> Box:
        """Of a tensor without dims."""
        return cls(Region((), ()), Region((), ()))


def split_axes(tensor: torch.Tensor) -> Axes:
    """The axes over which a tensor is cut; none where it is whole."""
    if not isinstance(tensor, DTensor):
        return ()
    names: tuple[Axis, ...] = tensor.device_mesh.mesh_dim_names
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What lies here, sharing memory; no part of a graph."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def own_piece(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or one that is the memory of the piece that lies here."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank that holds a piece, who must all call; a parameter stays one."""
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return nn.Parameter(whole, requires_grad=False) if isinstance(tensor, nn.Parameter) else whole


def like_parameter(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local tensor as the piece of one that is cut as `parameter` is; a number of its own stays one."""
    if not isinstance(parameter, DTensor) or piece.dim() == 0:
        return piece
    return DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def region_of(tensor: torch.Tensor) -> Region:
    """Where in the whole what this rank holds lies."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offset), tuple(shape))
