"""Small modules to train in the tests of `flowtrain.update`, with gradients that depend only on step and rank."""

from __future__ import annotations

import torch
from torch import nn

from flowtrain.config.schema import TrainConfig
from flowtrain.messages import UpdateOrder
from flowtrain.parallel.groups import Groups
from flowtrain.plan import Layout
from flowtrain.types import Module
from flowtrain.update.updater import Updater

MODULE_OF = {
    "model.visual.patch_embed.proj.weight": Module.ENCODER,
    "model.visual.norm.weight": Module.ENCODER,
    "model.visual.merger.linear.weight": Module.PROJECTOR,
    "model.visual.merger.linear.bias": Module.PROJECTOR,
    "model.language_model.embed_tokens.weight": Module.BACKBONE,
    "lm_head.weight": Module.BACKBONE,
}
SHAPES = {
    "model.visual.patch_embed.proj.weight": (5, 3),
    "model.visual.norm.weight": (5,),
    "model.visual.merger.linear.weight": (4, 5),
    "model.visual.merger.linear.bias": (4,),
    "model.language_model.embed_tokens.weight": (7, 4),
    "lm_head.weight": (7, 4),
}
TRAIN = TrainConfig(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
RATES = {Module.ENCODER: 1e-2, Module.PROJECTOR: 2e-2, Module.BACKBONE: 3e-3}


def make_parameters(
    dtype: torch.dtype = torch.float32, freeze: frozenset[Module] = frozenset()
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: nn.Parameter(
            torch.randn(shape, generator=generator, dtype=dtype), requires_grad=MODULE_OF[name] not in freeze
        )
        for name, shape in SHAPES.items()
    }


def make_updater(
    train: TrainConfig = TRAIN, dtype: torch.dtype = torch.float32, faults: frozenset[str] = frozenset()
) -> Updater:
    parameters = make_parameters(dtype, frozenset(Module(name) for name in train.freeze))
    return Updater(parameters, MODULE_OF, train, Groups(Layout(), 0), faults)


def gradient(name: str, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=dtype)


def give_gradients(
    parameters: dict[str, nn.Parameter], step: int, rank: int = 0, left_out: frozenset[Module] = frozenset()
) -> None:
    for name, parameter in parameters.items():
        if parameter.requires_grad and MODULE_OF[name] not in left_out:
            parameter.grad = gradient(name, step, rank, parameter.dtype)


def order(step: int, clip: float = 0.5, **changes: object) -> UpdateOrder:
    return UpdateOrder(step, 0.25, clip, RATES, **changes)  # type: ignore[arg-type]


def train_steps(updater: Updater, steps: range) -> None:
    """Run these steps; every third reaches no image."""
    for step in steps:
        text_only = frozenset({Module.ENCODER, Module.PROJECTOR}) if step % 3 == 0 else frozenset()
        give_gradients(updater.parameters, step, left_out=text_only)
        updater.reduce()
        updater.update(order(step))
