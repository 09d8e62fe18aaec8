"""Context parallelism of a backbone: a rank has a run of a pack's tokens, and in attention all tokens of some heads.

    embeddings (1, T, D) ─ own tokens ─▶ layers ─▶ head on own tokens ─▶ loss of own tokens ─ sum over ranks ─▶ loss
                                          │
              q k v (1, heads, T/c, dim) ─ all to all ─▶ (1, heads/c, T, dim) │ attention within each sample │ ─ back

Samples may lie across ranks: their borders, windows and image blocks are those of the whole pack, because attention
sees all of its tokens. Where there are fewer key-value heads than ranks, each is sent to all that need it.

Invariants: parameters are whole on every rank and the gradient of each is a share, of own tokens, to be summed; the
gradient of features is whole on every rank; positions are those of the whole pack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flowtrain.models.attention import add_exchange
from flowtrain.models.backbone import BackboneHalf
from flowtrain.parallel.autograd import enter, leave, own_chunk, paired
from flowtrain.parallel.cuts import check_heads
from flowtrain.parallel.roles import plan_tensor
from flowtrain.parallel.tensor import describe, own_levels


def apply_context(half: BackboneHalf, group: Any) -> None:
    """Run the half's forwards together with the ranks of `group`, from here on; its heads may have been cut before.

    Raises:
        PlanError: heads that do not divide by the ranks, or a layer that mixes tokens otherwise than by attention.
    """
    degree = dist.get_world_size(group)
    plan = plan_tensor(describe(half), 1, f"layout c{degree}")
    assert plan.stream is not None, "a backbone has a stream of tokens"
    for region in plan.regions:
        if region.heads is not None:
            check_heads(f"layout c{degree}, {region.path}", *region.heads, degree)
            add_exchange(half.model.get_submodule(region.path), _HeadsForTokens(group))
    _cut_stream(half, plan.stream, group)
    half.share = replace(
        half.share,
        multiple=half.share.multiple * degree,
        features=lambda tensor: enter(tensor, group),
        places=lambda places, targets, num_tokens: own_places(places, targets, num_tokens, group),
        total=lambda loss: leave(loss, group),
    )


def _cut_stream(half: BackboneHalf, stream: str, group: Any) -> None:
    """Own tokens of embeddings and positions go in, and with them the deep-stack features that fall on them.

    What comes from another section of a pipeline is of own tokens already.
    """

    def into(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = kwargs["position_ids"]
        rank, length = dist.get_rank(group), positions.shape[-1] // dist.get_world_size(group)
        kwargs = {**kwargs, "position_ids": positions[..., rank * length : (rank + 1) * length]}
        if half.running.is_first:
            kwargs["inputs_embeds"] = own_chunk(kwargs["inputs_embeds"], group)
        if kwargs.get("deepstack_visual_embeds") is not None:
            kwargs |= own_levels(kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"], group)
        return args, kwargs

    half.model.get_submodule(stream).register_forward_pre_hook(into, with_kwargs=True, prepend=True)


def own_places(
    places_K: torch.Tensor, targets_K: torch.Tensor, num_tokens: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of this rank's tokens, counted from the first of these."""
    length = num_tokens // dist.get_world_size(group)
    start = dist.get_rank(group) * length
    own_K = (places_K >= start) & (places_K < start + length)
    return places_K[own_K] - start, targets_K[own_K]


@dataclass(frozen=True, slots=True)
class _HeadsForTokens:
    """Around the attention of a layer: some tokens of all heads become all tokens of some heads, and back."""

    group: Any

    def enter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        degree = dist.get_world_size(self.group)
        repeats = max(1, degree // key.shape[1])
        if repeats > 1:
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        return self._to_tokens(query), self._to_tokens(key), self._to_tokens(value)

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """(1, T, heads / c, dim) → (1, T / c, heads, dim)."""
        degree = dist.get_world_size(self.group)
        _, tokens, heads, dim = out.shape
        sent = out.view(degree, tokens // degree, heads, dim)
        received = exchange(sent, self.group)  # (rank of the heads, own tokens, heads, dim)
        return received.transpose(0, 1).reshape(1, tokens // degree, degree * heads, dim)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """(1, heads, T / c, dim) → (1, heads / c, T, dim)."""
        degree = dist.get_world_size(self.group)
        _, heads, tokens, dim = x.shape
        sent = x.reshape(degree, heads // degree, tokens, dim)
        received = exchange(sent, self.group)  # (rank of the tokens, own heads, tokens, dim)
        return received.transpose(0, 1).reshape(1, heads // degree, degree * tokens, dim)


def exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Row r of dim 0 goes to rank r; row r of the result came from it."""
    return paired(x, group, _all_to_all, _all_to_all)


def _all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
