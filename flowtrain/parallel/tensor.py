"""Tensor parallelism of one half: parameters cut as the plan says, and the collectives between the pieces (`roles.py`).

    backbone   ids ─embed─▶ (1, T, D) ─take_chunk─▶ layers on own tokens ─ norm ─enter_chunks─▶ head ─▶ loss
                                                     │                                        its rows of the vocabulary
                                   norm ─enter_chunks─▶ q k v │ own heads, all tokens │ o ─leave_chunks─▶ + own tokens
    encoder    (…, D), whole:      norm ───enter──────▶ qkv   │ own heads             │ proj ──leave────▶ + whole

The half stays the transformers class that it is: linears keep their names and hold their pieces as plain tensors, so
that `fully_shard` cuts them again over another axis of the mesh.

Invariants: outside its regions an encoder computes the same bits on every rank; a backbone's features get the same
gradient, whole, on every rank; a parameter of `plan.cuts` has this rank's shape, on meta or not, from `apply` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from flowtrain.models.attention import add_exchange
from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.half import Half
from flowtrain.models.parts import places_of, set_parameter
from flowtrain.parallel.autograd import average_back, enter, enter_chunks, leave, leave_chunks, own_chunk, take_chunk
from flowtrain.parallel.cuts import Cut, take
from flowtrain.parallel.roles import Region, TensorPlan, Tree
from flowtrain.parallel.vocabulary import embed, summed_cross_entropy
from flowtrain.types import Module


def describe(half: Half) -> Tree:
    """What a plan of this half is made from; the half is whole, on meta or not."""
    parameters = half.all_parameters_by_name()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    head_dims = {
        path: module.head_dim
        for path, module in half.model.named_modules()
        if isinstance(getattr(module, "head_dim", None), int)
    }
    if Module.BACKBONE not in half.part:
        return Tree(shapes, head_dims)
    first = {place: name for name, places in places_of(half.model).items() for place in places}
    names = {module: path for path, module in half.model.named_modules()}
    embedding, head = (names[end] for end in (half.model.get_input_embeddings(), half.model.get_output_embeddings()))
    bias = f"{head}.bias"
    return Tree(
        shapes,
        head_dims,
        embedding.rpartition(".")[0],
        tuple(dict.fromkeys(first[f"{end}.weight"] for end in (embedding, head))),
        bias if bias in shapes else None,
    )


def apply_tensor(half: Half, plan: TensorPlan, group: Any, timeout_seconds: float) -> None:
    """Cut `half`, in place, over the ranks of `group`; `plan` is that of `describe(half)` for as many ranks.

    `timeout_seconds`: longest wait of a collective among ranks that hold the same key-value heads.
    """
    assert dist.get_world_size(group) == plan.degree, f"a plan for {plan.degree} ranks, a group of other size"
    rank = dist.get_rank(group)
    _cut_parameters(half.model, plan, rank)
    sharers = _group_of_sharers(plan, group, timeout_seconds)
    for region in plan.regions:
        _join(half.model, region, plan, group, sharers)
    if plan.stream is not None:
        assert isinstance(half, BackboneHalf)
        _cut_stream(half, plan.stream, group)
        _cut_vocabulary(half, plan, rank, group)


def cut_tensor(whole: Any, cut: Cut | None, rank: int) -> torch.Tensor:
    """A rank's part of a tensor, or of a slice of a safetensors file, of which only these bytes are read."""
    if cut is None:
        tensor: torch.Tensor = whole[...]
        return tensor
    return torch.cat(take(whole, cut, rank), dim=cut.dim)


def whole_of(part: torch.Tensor, cut: Cut, group: Any) -> torch.Tensor:
    """The whole tensor, on every rank, of a parameter or of its gradient or moment: what a checkpoint holds."""
    whole = part.new_zeros([cut.size if dim == cut.dim else n for dim, n in enumerate(part.shape)])
    rank = dist.get_rank(group)
    if cut.owners[rank] == rank:
        for there, here in cut.pieces(rank):
            whole[there] = part[here]
    dist.all_reduce(whole, group=group)
    return whole


def complete_gradients(
    gradients: Mapping[str, torch.Tensor], plan: TensorPlan, sum_: Callable[[Sequence[torch.Tensor]], None]
) -> None:
    """Make gradients whole, in place: sum those of which each rank has a share, multiply those of shared heads.

    Args:
        gradients: of the parameters that any rank reached, in the same order on every rank; those that another axis
            of the mesh cuts may be pieces, alike on the tensor-parallel ranks.
        sum_: replaces each tensor by its sum over the tensor-parallel ranks.
    """
    sum_([gradient for name, gradient in gradients.items() if name in plan.partial])
    for name, gradient in gradients.items():
        cut = plan.cuts.get(name)
        if cut is not None and cut.sharing > 1:
            gradient.mul_(cut.sharing)


# --- parameters -------------------------------------------------------------------------------------------------------


def _cut_parameters(model: nn.Module, plan: TensorPlan, rank: int) -> None:
    places = places_of(model)
    for name, cut in plan.cuts.items():
        whole = model.get_parameter(name)
        piece = cut_tensor(whole.detach(), cut, rank)
        parameter = nn.Parameter(piece, whole.requires_grad)
        for place in places[name]:
            set_parameter(model, place, parameter)


# --- regions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Border:
    """How tensors enter and leave the regions of a half."""

    enter: Callable[[torch.Tensor, Any], torch.Tensor]
    leave: Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _SharedHeads:
    """Key-value heads that several ranks hold: what their query heads send back is averaged over them.

    So each has an equal share of the gradient, and the sums over ranks in front of the heads stay right. Averaged here
    and not once a step in the parameters, because the key's norm rounds to float32: shares that differ round otherwise.
    """

    sharers: Any

    def enter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return query, average_back(key, self.sharers), average_back(value, self.sharers)

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        return out


def _group_of_sharers(plan: TensorPlan, group: Any, timeout_seconds: float) -> Any:
    """The ranks that hold the same key-value heads as this one; None where no two do."""
    sharing = next((cut for cut in plan.cuts.values() if cut.sharing > 1), None)
    if sharing is None:
        return None
    ranks = [dist.get_global_rank(group, rank) for rank in sharing.sharers(dist.get_rank(group))]
    timeout = timedelta(seconds=timeout_seconds)
    backend = dist.get_backend(group)
    return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)


def _join(model: nn.Module, region: Region, plan: TensorPlan, group: Any, sharers: Any) -> None:
    border = _Border(enter, leave) if plan.stream is None else _Border(enter_chunks, leave_chunks)
    for path in region.entries:
        hook = partial(_enter_first, border.enter, group)
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    row = model.get_submodule(region.row)
    row.forward = partial(_row_forward, row, border.leave, group)
    for path in (*region.columns, region.row):
        linear = model.get_submodule(path)
        linear.out_features, linear.in_features = linear.weight.shape
    if region.heads is not None:
        _tell_heads(model.get_submodule(region.path), *region.heads)
    if sharers is not None:
        add_exchange(model.get_submodule(region.path), _SharedHeads(sharers))


def _enter_first(
    bring: Callable[[torch.Tensor, Any], torch.Tensor],
    group: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring the hidden states in, which are a module's first argument or named so."""
    if args:
        return (bring(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": bring(kwargs["hidden_states"], group)}


def _row_forward(
    linear: nn.Linear, leave: Callable[[torch.Tensor, Any], torch.Tensor], group: Any, x: torch.Tensor
) -> torch.Tensor:
    """A linear whose inputs are cut: the ranks' parts are summed, then the bias is added once."""
    out = leave(F.linear(x, linear.weight), group)
    return out if linear.bias is None else out + linear.bias


def _tell_heads(attention: nn.Module, num_heads: int, num_kv_heads: int) -> None:
    local = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_key_value_groups": num_heads // num_kv_heads,
        "embed_dim": num_heads * attention.head_dim,
    }
    for name, value in local.items():
        if hasattr(attention, name):
            setattr(attention, name, value)


# --- the backbone's ends ----------------------------------------------------------------------------------------------


def _cut_stream(half: BackboneHalf, stream: str, group: Any) -> None:
    """Own tokens of the embeddings go in, with the deep-stack features that belong to them; all tokens come out.

    Between sections of a pipeline each rank's tokens stay its own.
    """

    def into(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if half.running.is_first:
            kwargs = {**kwargs, "inputs_embeds": take_chunk(kwargs["inputs_embeds"], group)}
        if kwargs.get("deepstack_visual_embeds") is not None:
            levels = [enter(level_VD, group) for level_VD in kwargs["deepstack_visual_embeds"]]
            kwargs |= own_levels(kwargs["visual_pos_masks"], levels, group)
        return args, kwargs

    def out_of(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if half.running.is_last:
            output.last_hidden_state = enter_chunks(output.last_hidden_state, group)
        return output

    text_model = half.model.get_submodule(stream)
    text_model.register_forward_pre_hook(into, with_kwargs=True)
    text_model.register_forward_hook(out_of)


def own_levels(visual_1T: torch.Tensor, levels: list[torch.Tensor], group: Any) -> dict[str, Any]:
    """The part of mask and deep-stack features that falls on this rank's tokens."""
    length = visual_1T.shape[1] // dist.get_world_size(group)
    start = dist.get_rank(group) * length
    own = visual_1T[:, start : start + length]
    first = int(visual_1T[:, :start].sum())
    rows = slice(first, first + int(own.sum()))
    return {
        "visual_pos_masks": own,
        "deepstack_visual_embeds": [level_VD[rows] for level_VD in levels],
    }


def _cut_vocabulary(half: BackboneHalf, plan: TensorPlan, rank: int, group: Any) -> None:
    embedding, head = half.model.get_input_embeddings(), half.model.get_output_embeddings()
    (rows,) = plan.cuts[plan.vocabulary[0]].ranges[rank]
    padding = embedding.padding_idx
    embedding.padding_idx = padding - rows[0] if padding is not None and rows[0] <= padding < rows[1] else None
    embedding.num_embeddings = head.out_features = rows[1] - rows[0]
    embedding.forward = lambda ids: embed(embedding, ids, rows, group)
    half.share = replace(
        half.share,
        multiple=plan.degree,
        whole_tokens=partial(enter_chunks, group=group),
        own_tokens=partial(own_chunk, group=group),
        cross_entropy=partial(summed_cross_entropy, rows=rows, group=group),
    )
