"""What a rank holds of a tensor that may be cut over a mesh: a plain tensor is whole, a DTensor has a piece here."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flowtrain.parallel.mesh import Axis

Axes = tuple[Axis, ...]


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


def piece_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that a rank holds of one that is cut as `parameter` is; a view."""
    if not isinstance(parameter, DTensor) or whole.dim() == 0:
        return whole
    shape, offset = compute_local_shape_and_global_offset(whole.shape, parameter.device_mesh, parameter.placements)
    for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, start if length else 0, length)
    return whole
