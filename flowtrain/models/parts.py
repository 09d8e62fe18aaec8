"""One half of a model in memory: the transformers class, and only this half's own tensors (contract C4).

    config.json ──▶ whole model on `meta` (no memory) ──▶ table: parameter → module
                                                             │ of this half only
    weights/*.safetensors ── read by name ───────────────────┴──▶ parameters on the device, in the parameter dtype

A process that holds pieces of the parameters reads these alone: of a file no more bytes than it keeps.

Invariants: a parameter of the other half stays on `meta`; every own parameter comes from the file, none is silently
left as initialised; tied parameters are one tensor; buffers that no file holds (rotary frequencies) are computed as the
plain model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.errors import ConfigError
from flowtrain.models import weights


def read_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """The folder's transformers config, never from the network."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path: {model_dir} has no config.json; give a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir / 'config.json'}: transformers cannot read it ({_one_line(error)}); repair the folder"
        ) from error


def build_on_meta(
    model_config: Any,
    trust_remote_code: bool,
    attention: dict[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The whole model without memory; `attention` names the kernel of each sub-config.

    `dtype` is that of the parameters, also of those that stay on meta: some families ask the whole model for it.
    """
    kwargs: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return from_config(model_config, trust_remote_code, dtype, **kwargs)


def from_config(model_config: Any, trust_remote_code: bool, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    if dtype is torch.float64 and has_experts(model_config):
        kwargs["experts_implementation"] = "eager"  # the fused product of experts knows no float64
    try:
        return AutoModelForImageTextToText.from_config(
            model_config, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path: {model_config.model_type!r} is not an image-text-to-text model that transformers can "
            f"build ({_one_line(error)})"
        ) from error


def check_backbone(model_config: Any) -> None:
    """ConfigError where the backbone's attention does what the kernels for packs do not."""
    text_config = model_config.get_text_config()
    if getattr(text_config, "attn_logit_softcapping", None):
        raise ConfigError(
            f"model.path: the backbone {text_config.model_type!r} caps attention logits (attn_logit_softcapping), "
            "which attention over packs does not support: use a model without"
        )


def has_experts(model_config: Any) -> bool:
    text_config = model_config.get_text_config()
    return any(getattr(text_config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _one_line(error: BaseException) -> str:
    """The start of a library's message, fit for a sentence of ours."""
    return shorten(str(error), 200, placeholder=" …")


Read = Callable[[str, torch.Tensor, weights.StoredTensor, torch.device, torch.dtype], torch.Tensor]
"""From a name, its empty parameter and the stored tensor to what this process holds, a tensor like the empty one."""


def load_part(
    model: Any,
    held: Set[str],
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    read: Read,
) -> None:
    """Fill the parameters `held`, and all buffers, of a model built on meta; the rest stays on meta.

    `shapes`: of the whole parameters; `read`: what this process holds of one, from its stored tensor.

    Raises:
        ConfigError: the folder lacks a tensor of this part, or holds it in another shape.
    """
    files = weights.weight_files(folder)
    places = places_of(model)
    stored_as = {name: _stored_name(name, places[name], files, folder) for name in places if name in held}
    names = {stored: name for name, stored in stored_as.items()}
    for stored, tensor in weights.open_tensors(files, names):
        name = names[stored]
        empty = model.get_parameter(name)
        if tuple(tensor.get_shape()) != shapes[name]:
            raise ConfigError(
                f"{files[stored]}: {stored} has shape {tuple(tensor.get_shape())}, config.json asks for "
                f"{shapes[name]}; the weights belong to another model"
            )
        held = nn.Parameter(read(name, empty, tensor, device, dtype), requires_grad=empty.requires_grad)
        for place in places[name]:
            set_parameter(model, place, held)
    _fill_buffers(model, files, device, dtype)


def read_whole(
    name: str, empty: torch.Tensor, stored: weights.StoredTensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """All of a stored tensor, in memory of its own."""
    return stored[()].to(device=device, dtype=dtype, copy=True)


def places_of(model: nn.Module) -> dict[str, list[str]]:
    """First name of every parameter → all its names (more than one where it is tied)."""
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return places


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a model's files, such as the balance of a router; the others are computed."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _stored_name(name: str, aliases: Iterable[str], files: dict[str, Path], folder: Path) -> str:
    for alias in (name, *aliases):
        if alias in files:
            return alias
    raise ConfigError(f"{folder}: the weights lack {name}; fetch the model folder again, or set model.init: random")


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _fill_buffers(model: Any, files: dict[str, Path], device: torch.device, dtype: torch.dtype) -> None:
    """Buffers are small, whole on either side: from the file where it holds them, else as the model computes them.

    A model of this dtype computes them with `dtype` as the default one.
    """
    names = [name for name, _ in model.named_buffers()]
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[attribute] = torch.empty_like(module._buffers[attribute], device="cpu")
        module._is_hf_initialized = False
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model.initialize_weights()
    finally:
        torch.set_default_dtype(default)
    stored = dict(weights.read_tensors(files, [name for name in names if name in files]))
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        value = stored.get(name, module._buffers[attribute])
        module._buffers[attribute] = value.to(device)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ConfigError(
                    f"model.path: {path}.{attribute} is a tensor that cannot be loaded for one half alone: "
                    "use another model"
                )
