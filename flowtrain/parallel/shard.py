"""Cuts the parameters of a half over the `dp_shard` ranks (FSDP2): gathered unit by unit when they are used.

| unit | parameters |
|---|---|
| each decoder layer, vision block or deep-stack merger | its own |
| a projector module; embedding and head where they are not tied | its own |
| the half itself | what is left: norms, patch embedding, a tied embedding |
| none | what not every forward reaches: the projector beside a backbone, bare vectors such as `image_newline` |
| none | experts that lie over `ep` ranks (`experts.py`) |

A unit is gathered for its forward and again for its backward, while those of the layer behind it are on their way.

Gradients are summed over the ranks in the parameters' own dtype at each backward, and never averaged (C3). A parameter
without a unit is whole on every rank and summed once a step: a pack without images leaves it without a gradient, and a
sum over a unit would then not be the same collective on every rank.

Invariants: parameters of a unit train together or not at all; every own parameter is in one unit or in none; the half
is the root, so that its registered method is the one place where a forward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from flowtrain.models.half import Half
from flowtrain.models.playback import largest
from flowtrain.types import Cut, Module


def shard(half: Half, mesh: DeviceMesh, kept: Set[str] = frozenset()) -> None:
    """Cut `half`, in place and on meta, over a mesh of one dim; `half.forward_method` is a collective from here on.

    `kept`: parameters that stay as they are: experts that lie over ranks already.
    """
    cut = _cut_names(half) - kept
    whole = {parameter for name, parameter in half.model.named_parameters() if name not in cut}
    experts = {half.model.get_parameter(name) for name in kept}
    ways = {"mesh": mesh, "reshard_after_forward": True, "ignored_params": experts}
    for layers in _layer_lists(half):
        for layer in layers:
            fully_shard(layer, **ways)
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    for module in _single_units(half, whole):
        fully_shard(module, **ways)
    fully_shard(half, **{**ways, "ignored_params": whole})
    for module in half.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _check_trains_together(module)
    register_fsdp_forward_method(half, half.forward_method)
    half.is_sharded = True
    _always_has_a_graph(half)


def filled(half: Half) -> None:
    """Tell FSDP, which keeps the memory of a piece, that it is another one now."""
    for module in half.modules():
        if isinstance(module, FSDPModule):
            for param in _params(module):
                param.reset_sharded_param()


def _params(module: FSDPModule) -> list[Any]:
    """FSDP's own records of the parameters in a module's unit."""
    return [param for group in module._get_fsdp_state()._fsdp_param_groups for param in group.fsdp_params]


def _cut_names(half: Half) -> frozenset[str]:
    """Parameters that every forward reaches: all of encoder or backbone, and the projector modules of a producer."""
    modules = half.module_of()
    names = {name for name in half.held_names if modules[name] is not Module.PROJECTOR}
    if half.cut is Cut.AFTER_PROJECTOR:
        for path, part in largest(half.model, Module.PROJECTOR):
            names |= {f"{path}.{name}" for name, _ in part.named_parameters()} & half.held_names
    return frozenset(names)


def _layer_lists(half: Half) -> Iterator[list[FSDPModule]]:
    """Lists of modules of this half, each with parameters, or those of each list that are held here; none lies inside
    another's element."""
    names = _cut_names(half)
    found: list[str] = []
    for path, module in half.model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{other}.") for other in found):
            continue
        of_elements = [{f"{path}.{i}.{name}" for name, _ in m.named_parameters()} for i, m in enumerate(module)]
        held = [m for m, element in zip(module, of_elements, strict=True) if element and element <= names]
        if held and all(element <= names or names.isdisjoint(element) for element in of_elements):
            found.append(path)
            yield held


def _single_units(half: Half, whole: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Projector modules, and embedding and head where they are two; layers are units already."""
    model = half.model
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = all(end is not None for end in ends) and ends[0].weight is ends[1].weight
    candidates = [part for _, part in largest(model, Module.PROJECTOR)] + ([] if tied else ends)
    for module in candidates:
        parameters = list(module.parameters()) if module is not None else []
        inside = any(isinstance(part, FSDPModule) for part in module.modules()) if parameters else True
        if not inside and not any(p in whole for p in parameters):
            yield module


def _check_trains_together(module: FSDPModule) -> None:
    kinds = {param.sharded_param.requires_grad for param in _params(module)}
    assert len(kinds) < 2, f"a unit of {type(module).__name__} has frozen and trainable parameters"


def _always_has_a_graph(half: Half) -> None:
    """A frozen embedding gives out what requires a gradient, so that a pack without images has a backward too.

    Layers gather their parameters again in the backward, which is a collective: each rank must have one.
    """
    embedding = half.model.get_input_embeddings()
    if Module.BACKBONE not in half.part or any(parameter.requires_grad for parameter in embedding.parameters()):
        return

    def require(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    embedding.register_forward_hook(require)
