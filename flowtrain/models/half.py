"""What the two halves share: how they are built, their dtypes, and their parameters by the whole model's names.

| `model.dtype` | parameters | computed in | features in the pool |
|---|---|---|---|
| float32 | float32 | float32 | float32 |
| bfloat16 | float32 | autocast to bfloat16 | bfloat16 |
| float64 | float64 | float64 | float64 |
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.models import attention
from flowtrain.models.families import Family, family_of
from flowtrain.models.parts import build_on_meta, load_part, read_config, read_whole, stored_buffers
from flowtrain.models.playback import Parts, find_parts
from flowtrain.models.table import module_of_name, module_of_parameters
from flowtrain.models.weights import StoredTensor
from flowtrain.types import Cut, Module, Role


class Half(nn.Module):
    """A whole transformers model of which only the parameters of `part` exist; the others stay on meta.

    Attributes:
        forward_method: the method in which every forward of this half begins.
        is_sharded: its parameters are cut over several ranks, so that a forward, and a backward, is a collective:
            each of them must run as many.
    """

    forward_method: str
    is_sharded: bool = False

    def __init__(
        self, model: Any, family: Family, cut: Cut, part: frozenset[Module], table: dict[str, Module],
        device: torch.device, compute_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.family = family
        self.cut = cut
        self.part = part
        self.device = device
        self.compute_dtype = compute_dtype
        self._module_of = {name: module for name, module in table.items() if module in part}
        self._held = frozenset(self._module_of)

    @staticmethod
    def part_of(config: Config) -> frozenset[Module]:
        """The modules whose parameters are this half's."""
        raise NotImplementedError

    @classmethod
    def load(
        cls,
        model_dir: Path,
        weights_dir: Path,
        config: Config,
        device: torch.device,
        dtype: torch.dtype | str,
        spread: Spread | None = None,
    ) -> Self:
        """Build this half and read its parameters from `weights_dir`: all of each, or its pieces by `spread`.

        `dtype` is that of the parameters; the compute dtype is `config.model.dtype`.

        Raises:
            ConfigError: the folder cannot be used, or its family cannot be cut.
            PlanError: the attention kernel asked for cannot run here.
        """
        part = cls.part_of(config)
        attention.register()
        parameter_dtype = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
        model_config = read_config(model_dir, config.model.trust_remote_code)
        family = family_of(model_config.model_type)
        text_config = model_config.get_text_config()
        compute_dtype = torch_dtype(config.model.dtype)
        kernel = attention.choose_kernel(
            config.model.attention,
            attention.has_flash(device),
            compute_dtype,
            float(getattr(text_config, "attention_dropout", None) or 0.0),
            family.image_blocks,
        )
        kernels = _kernels(model_config, text_config, kernel)
        model = build_on_meta(model_config, config.model.trust_remote_code, kernels, parameter_dtype)
        table = module_of_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(table[name] in part and table[name] not in config.frozen)
        half = cls(model, family, config.cut, part, table, device, compute_dtype)
        if config.recompute(Role.CONSUMER if Module.BACKBONE in part else Role.PRODUCER):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        _tell_device(model, device)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if spread is not None:
            spread.cut(half)
        read = read_whole if spread is None else spread.read
        load_part(model, half.held_names, weights_dir, device, parameter_dtype, shapes, read)
        if spread is not None:
            spread.filled(half)
        model.train()
        return half

    @cached_property
    def parts(self) -> Parts:
        """Encoder and projector as modules, for the cut before the projector."""
        return find_parts(self.model)

    @property
    def held_names(self) -> frozenset[str]:
        """Parameters of this half that exist in this process, whole or in part: all, but in a pipeline."""
        return self._held

    def hold(self, names: Iterable[str]) -> None:
        """Hold these of the half's parameters only; before they are loaded."""
        self._held = frozenset(names) & self._module_of.keys()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters held here, frozen ones too, under the names of the whole model."""
        return {name: p for name, p in self.model.named_parameters() if name in self._held}

    def all_parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The whole half's parameters; those that other ranks of a pipeline hold are on meta here."""
        return {name: p for name, p in self.model.named_parameters() if name in self._module_of}

    def trainable_names(self) -> list[str]:
        """Of the whole half, in the model's order."""
        return [name for name, p in self.all_parameters_by_name().items() if p.requires_grad]

    def tensors_by_name(self) -> dict[str, torch.Tensor]:
        """What an export holds of this half: its parameters, and those of its buffers that a model folder stores."""
        buffers = stored_buffers(self.model).items()
        own = {name: buffer for name, buffer in buffers if module_of_name(name) in self.part}
        return {**self.parameters_by_name(), **own}

    def module_of(self) -> dict[str, Module]:
        """Of every parameter of the whole half."""
        return dict(self._module_of)

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which this half computes: autocast for 16 bit, else none."""
        if self.compute_dtype is torch.bfloat16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()


class Spread(Protocol):
    """How the parameters of a half are spread over several processes."""

    def cut(self, half: Half) -> None:
        """Turn parameters on meta into pieces on meta, in place, and install what gathers or combines them."""

    def read(
        self, name: str, empty: torch.Tensor, stored: StoredTensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """This process's piece of a parameter, of which no more than that is read."""

    def filled(self, half: Half) -> None:
        """Every parameter is there now."""


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"model.dtype: {name!r} is not a torch dtype")
    return dtype


def _tell_device(model: Any, device: torch.device) -> None:
    """transformers asks a model's first parameter where it is; where that is one of the other half, we answer."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.device.type == "meta":
            kind = type(part)
            members = {"device": property(lambda _: device), "__module__": kind.__module__, "__doc__": kind.__doc__}
            part.__class__ = type(kind.__name__, (kind,), members)


def _kernels(model_config: Any, text_config: Any, kernel: str) -> dict[str, str]:
    """Kernel by sub-config: packs for the text part, transformers' own `sdpa` for the rest."""
    kernels = {"": "sdpa"}
    for name in model_config.sub_configs:
        kernels[name] = kernel if getattr(model_config, name) is text_config else "sdpa"
    return kernels
