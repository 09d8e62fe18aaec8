"""AdamW over the parameters of one side: a group for each module, with and without weight decay.

| left out of weight decay | known by |
|---|---|
| biases, norms, bare vectors | one axis or none, or a module named `norm` |
| embedding tables | a last name ending in `embed`, `embedding`, …; patch projections decay |

A frozen parameter is in no group. A parameter whose gradient is None is not touched: no decay, no moments (C2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from flowtrain.config.schema import TrainConfig
from flowtrain.types import Module

_EMBEDDING = re.compile(r"(^|_)(embed|embeds|embedding|embeddings|embed_tokens|wte|wpe)$")


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to this parameter."""
    if parameter.ndim <= 1:
        return False
    owner = [part for part in name.split(".") if part != "weight"][-1]
    is_table = _EMBEDDING.search(owner) is not None and not owner.startswith("patch")
    return "norm" not in owner and not is_table


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], module_of: Mapping[str, Module], train: TrainConfig
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; each group also has `module`. Rates are set before each step.

    A place in a pipeline may have none of them, and takes part in a step all the same.
    """
    groups: dict[tuple[Module, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            groups.setdefault((module_of[name], decays(name, parameter)), []).append(parameter)
    if not groups:
        groups[Module.BACKBONE, True] = []
    return torch.optim.AdamW(
        [
            {"params": members, "module": module, "weight_decay": train.weight_decay if decay else 0.0}
            for (module, decay), members in groups.items()
        ],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        fused=True,
    )
