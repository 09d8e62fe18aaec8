"""Expert parallelism: each rank has some experts whole, and tokens go to the ranks of their experts and back.

    tokens (N, D), experts chosen ─ sort by rank ─ all to all ─▶ own experts ─ all to all ─▶ weighted sum, by token

The ranks are borrowed from `dp_shard` and `cp`: with e2 on f4, ranks 0 1 and 2 3 have all experts between them, and
ranks 0 and 2 hold the same ones. What is not an expert is cut and summed as the layout says without `e`.

Invariants: the gradient of an expert is a sum over the tokens of all ranks that it was sent tokens from, so it is
summed over those ranks only that hold the same experts; every forward and backward is a collective of the group, also
where a rank sends or gets no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flowtrain.models.half import Half
from flowtrain.models.parts import set_parameter
from flowtrain.parallel.autograd import paired
from flowtrain.parallel.cuts import Cut, cut_runs
from flowtrain.parallel.tensor import cut_tensor

EXPERTS = "num_experts"
STACKED_DIMS = 3


@dataclass(frozen=True, slots=True)
class ExpertCuts:
    """How experts lie over the `ep` ranks, of which this is `rank`; `cuts`: of every parameter of experts."""

    rank: int = 0
    cuts: Mapping[str, Cut] = field(default_factory=dict)


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold the weights of all experts of a layer, stacked."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(number := getattr(module, EXPERTS, None), int)
        and (own := list(module.parameters(recurse=False)))
        and all(parameter.dim() == STACKED_DIMS and len(parameter) == number for parameter in own)
    ]


def apply_experts(half: Half, group: Any) -> ExpertCuts:
    """Keep this rank's experts of `half`, in place, on meta or not, and exchange tokens in each forward from here."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    cuts: dict[str, Cut] = {}
    for path, module in expert_modules(half.model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = cut_runs(len(parameter), degree, 0)
            piece = cut_tensor(parameter.detach(), cut, rank)
            set_parameter(half.model, f"{path}.{name}", nn.Parameter(piece, parameter.requires_grad))
            cuts[f"{path}.{name}"] = cut
        setattr(module, EXPERTS, getattr(module, EXPERTS) // degree)
        module.forward = partial(_forward, module, group)
    half.is_sharded = True
    return ExpertCuts(rank, cuts)


def _forward(
    experts: nn.Module, group: Any, hidden_ND: torch.Tensor, index_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """What all experts together give for this rank's tokens; K of them see each."""
    degree = dist.get_world_size(group)
    chosen, order = index_NK.reshape(-1).sort(stable=True)
    token = order // index_NK.shape[1]
    own = getattr(experts, EXPERTS)
    sent = torch.bincount(chosen // own, minlength=degree)
    counts = torch.stack([sent, _all_to_all(sent, [1] * degree, [1] * degree, group)]).tolist()
    there = _all_to_all(chosen % own, counts[0], counts[1], group)
    given_MD = _exchange(hidden_ND[token], counts[0], counts[1], group)
    made_MD = given_MD
    if len(given_MD):
        made_MD = type(experts).forward(experts, given_MD, there[:, None], given_MD.new_ones(len(given_MD), 1))
    back = _exchange(made_MD, counts[1], counts[0], group) * weights_NK.reshape(-1)[order, None]
    return torch.zeros_like(hidden_ND).index_add(0, token, back.to(hidden_ND.dtype))


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """`sent[r]` rows go to rank r, `received[r]` come from it; gradients take the way back."""

    def ahead(x: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_to_all(x, sent, received, group)

    def back(x: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_to_all(x, received, sent, group)

    return paired(rows, group, ahead, back)


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
