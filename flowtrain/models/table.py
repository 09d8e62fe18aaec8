"""Which part of the model a parameter belongs to: encoder, projector or backbone, each exactly once (contract C4).

Freezing, learning rates, gradient norms, the cut and the checkpoints all ask this one table. It reads the dotted name
from the left:

    model.visual.blocks.0.attn.qkv.weight         visual                     → encoder
    model.visual.merger.linear_fc1.weight         visual, then merger        → projector
    model.image_newline                           image_newline              → projector
    model.language_model.layers.0.mlp.up_proj     language_model             → backbone
    lm_head.weight                                lm_head                    → backbone

A name that nothing claims is an error: a new family must be looked at by a person before it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from flowtrain.errors import ConfigError
from flowtrain.types import Module

if TYPE_CHECKING:
    from flowtrain.telemetry.tables import ParameterRow

BACKBONE_NAMES = frozenset({"language_model", "text_model", "lm_head"})
ENCODER_NAMES = frozenset({"visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed"})
PROJECTOR_NAMES = frozenset(
    {
        "merger",
        "deepstack_merger_list",
        "multi_modal_projector",
        "multimodal_projector",
        "mm_projector",
        "connector",
        "aligner",
        "embed_vision",
        "vision_projector",
        "vision_projection",
        "image_newline",
        "view_seperator",
        "view_separator",
        "vision_resampler",
    }
)


def module_of_name(name: str) -> Module | None:
    """The part that owns the parameter of this dotted name, or None when nothing claims it."""
    inside_encoder = False
    for component in name.split("."):
        if component in PROJECTOR_NAMES:
            return Module.PROJECTOR
        if component in BACKBONE_NAMES and not inside_encoder:
            return Module.BACKBONE
        inside_encoder = inside_encoder or component in ENCODER_NAMES
    return Module.ENCODER if inside_encoder else None


def module_of_parameters(model: nn.Module) -> dict[str, Module]:
    """Every parameter of a whole model, in the model's own order, tied ones once under their first name.

    Raises:
        ConfigError: a parameter that no part claims; the sentence names it and the model class.
    """
    table: dict[str, Module] = {}
    for name, _ in model.named_parameters():
        module = module_of_name(name)
        if module is None:
            raise ConfigError(
                f"{type(model).__name__}: parameter {name} belongs to no known part of the model; "
                "this model family is not supported: set model.path to one that is"
            )
        table[name] = module
    return table


def parameter_rows(parameters: Mapping[str, nn.Parameter], modules: Mapping[str, Module]) -> tuple[ParameterRow, ...]:
    """The start-up table's lines for one half: one a module, trainability and dtype."""
    from flowtrain.telemetry.tables import ParameterRow

    groups: dict[tuple[Module, bool, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((modules[name], parameter.requires_grad, parameter.dtype), []).append(parameter)
    return tuple(
        ParameterRow(
            module, trainable, count := _count(group), count * dtype.itemsize, str(dtype).removeprefix("torch.")
        )
        for (module, trainable, dtype), group in groups.items()
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
