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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SEQUENCE_DIM = 1
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Collective = Callable[[torch.Tensor, Any], torch.Tensor]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, ahead: Collective, back: Collective) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return ahead(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


@torch.compiler.disable
def paired(x: torch.Tensor, group: Any, ahead: Collective, back: Collective) -> torch.Tensor:
    """`ahead(x, group)`, whose gradient goes through `back`; both are called by every rank of the group."""
    out: torch.Tensor = _Pair.apply(x, group, ahead, back)
    return out


def enter(x: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x, group, _same, _sum)


def average_back(x: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x, group, _same, _mean)


def leave(x: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x, group, _sum, _same)


def take_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x_1TD, group, _copy_of_own_chunk, all_chunks)


def enter_chunks(x_1CD: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x_1CD, group, all_chunks, _sum_own_chunk)


def leave_chunks(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    return paired(x_1TD, group, _sum_own_chunk, all_chunks)


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


def _same(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _mean(x: torch.Tensor, group: Any) -> torch.Tensor:
    return _sum(x, group) / dist.get_world_size(group)


def _copy_of_own_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    return own_chunk(x_1TD, group).clone()


def _sum_own_chunk(x_1TD: torch.Tensor, group: Any) -> torch.Tensor:
    first = x_1TD.transpose(0, SEQUENCE_DIM).contiguous()
    own = first.new_empty(len(first) // dist.get_world_size(group), *first.shape[1:])
    _reduce_scatter(own, first, group=group)
    return own.transpose(0, SEQUENCE_DIM)
