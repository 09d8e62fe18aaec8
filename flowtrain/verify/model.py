"""The uncut model of the reference: transformers' own class, the run's weights, and who owns which parameter.

| parameter | belongs to |
|---|---|
| of the decoder, the token embedding or the output head | backbone |
| of the vision encoder, outside its projector | encoder |
| all else (mergers, projectors, separators) | projector |

Ownership is asked of the model object (`get_decoder`, `get_encoder`, `get_input_embeddings`, `get_output_embeddings`);
only a projector inside the vision encoder has to be told by its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.errors import ConfigError
from flowtrain.types import Module

PROJECTOR_INSIDE = re.compile(
    r"(^|\.)(\w*merger\w*|\w*projector\w*|\w+_projection|aligner|connector|\w*resampler)(\.|$)"
)


def build_model(model_dir: Path, weights_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The whole model in training mode with `sdpa` attention, every weight from `weights_dir`.

    Raises:
        ConfigError: a weight that is missing or left over, or a model with dropout, which no two runs share.
    """
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    model_config = AutoConfig.from_pretrained(model_dir, **options)
    text_config = model_config.get_text_config()
    experts = any(getattr(text_config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    # transformers' faster ways of running experts know no float64.
    kwargs = {"experts_implementation": "eager"} if experts and dtype is torch.float64 else {}
    model = AutoModelForImageTextToText.from_config(
        model_config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code, **kwargs
    )
    files = sorted(weights_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{weights_dir} holds no safetensors weights to start the reference from")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    first_name = tied_names(model)
    held = {first_name.get(name, name) for name in tensors}
    state = model.state_dict()
    left_over = sorted(tensors.keys() - state.keys())
    missing = sorted(name for name in state if first_name.get(name, name) not in held)
    if left_over or missing:
        raise ConfigError(
            f"{weights_dir}: the weights do not fit {type(model).__name__} "
            f"({len(missing)} missing, {len(left_over)} left over, such as {(missing + left_over)[0]})"
        )
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    _refuse_dropout(model)
    return model.train()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter → the first name of that parameter (`named_parameters` order)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, int | float) and rate > 0:
            raise ConfigError(
                f"{name or type(model).__name__} drops out at rate {rate}: two runs cannot be compared; "
                "set the dropout rates of config.json to 0"
            )


def modules_of(model: Any) -> dict[str, Module]:
    """The owner of every parameter, by its first name, in the model's order."""
    decoder = model.get_decoder()
    encoder = model.get_encoder(modality="image")
    heads = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    backbone = {id(parameter) for part in (decoder, *heads) for parameter in part.parameters()}
    encoder_names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    table: dict[str, Module] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in backbone:
            table[name] = Module.BACKBONE
        elif id(parameter) in encoder_names and not PROJECTOR_INSIDE.search(encoder_names[id(parameter)]):
            table[name] = Module.ENCODER
        else:
            table[name] = Module.PROJECTOR
    return table


def decays(model: nn.Module) -> dict[str, bool]:
    """Whether weight decay applies: not to biases, norms, bare vectors and embeddings, told by their owner's class."""
    result: dict[str, bool] = {}
    for owner_name, owner in model.named_modules():
        kept = isinstance(owner, nn.Embedding) or "norm" in type(owner).__name__.lower()
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{owner_name}.{attribute}" if owner_name else attribute
            vector = parameter.ndim <= 1
            result.setdefault(name, not (kept or vector or attribute.endswith("bias") or "embedding" in attribute))
    return result
