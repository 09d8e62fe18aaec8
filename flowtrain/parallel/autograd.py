"""Collectives of tensor-parallel regions, each with the collective that its backward is.

| forward | backward | used |
|---|---|---|
| `enter`: nothing | sum over ranks | what is whole enters a region whose ranks each use it in part |
| `average_back`: nothing | mean over ranks | what the ranks hold alike, and each uses in part |
| `leave`: sum over ranks | nothing | the parts that the ranks computed, whole again |
| `take_chunk`: own tokens | all tokens | a whole row of tokens becomes one chunk a rank |
| `enter_chunks`: all tokens | sum, own tokens | chunks enter a region |
| `leave_chunks`: sum, own tokens | all tokens | the parts that the ranks computed, a chunk each |

Chunks lie along dim 1 of (1, T, …) tensors, T a multiple of the ranks. Every rank gets the same bits where it gets the
same numbers. Waiting is bounded by the group's time-out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SEQUENCE_DIM = 1
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def enter(x: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _Enter.apply(x, group)
    return out


def average_back(x: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _AverageBack.apply(x, group)
    return out


def leave(x: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _Leave.apply(x, group)
    return out


def take_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _TakeChunk.apply(x_1TD, group)
    return out


def enter_chunks(x_1CD: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _EnterChunks.apply(x_1CD, group)
    return out


def leave_chunks(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    out: torch.Tensor = _LeaveChunks.apply(x_1TD, group)
    return out


def own_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    """A view of this rank's tokens."""
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    length, left = divmod(x_1TD.shape[SEQUENCE_DIM], degree)
    assert left == 0, f"{x_1TD.shape[SEQUENCE_DIM]} tokens are no multiple of {degree} ranks"
    return x_1TD.narrow(SEQUENCE_DIM, rank * length, length)


def all_chunks(x_1CD: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' tokens in order."""
    first = x_1CD.transpose(0, SEQUENCE_DIM).contiguous()
    whole = first.new_empty(len(first) * dist.get_world_size(group), *first.shape[1:])
    _all_gather(whole, first, group=group)
    return whole.transpose(0, SEQUENCE_DIM)


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _sum_own_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    first = x_1TD.transpose(0, SEQUENCE_DIM).contiguous()
    own = first.new_empty(len(first) // dist.get_world_size(group), *first.shape[1:])
    _reduce_scatter(own, first, group=group)
    return own.transpose(0, SEQUENCE_DIM)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class _AverageBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group) / dist.get_world_size(ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _TakeChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return own_chunk(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_chunks(grad, ctx.group), None


class _EnterChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_chunks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_own_chunk(grad, ctx.group), None


class _LeaveChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sum_own_chunk(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_chunks(grad, ctx.group), None
