"""From a model folder to one half in memory: the transformers class, and only this half's own tensors (contract C4).

    config.json ──▶ whole model on `meta` (no memory) ──▶ table: parameter → module
                                                             │ of this half only
    weights/*.safetensors ── read by name ───────────────────┴──▶ parameters on the device, in the parameter dtype

Invariants: a parameter of the other half stays on `meta`; every own parameter comes from the file, none is silently
left as initialised; tied parameters are one tensor; buffers that no file holds (rotary frequencies) are computed as the
plain model does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.models import weights
from flowtrain.types import Module

RECORD_NAME = "init.json"


def read_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """The folder's transformers config, never from the network."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path: {model_dir} has no config.json; give a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir / 'config.json'}: transformers cannot read it ({error}); repair the folder"
        ) from error


def build_on_meta(model_config: Any, trust_remote_code: bool, attention: dict[str, str] | None = None) -> Any:
    """The whole model without memory; `attention` names the kernel of each sub-config."""
    kwargs: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return _from_config(model_config, trust_remote_code, **kwargs)


def _from_config(model_config: Any, trust_remote_code: bool, **kwargs: Any) -> Any:
    try:
        return AutoModelForImageTextToText.from_config(
            model_config, dtype=torch.float32, trust_remote_code=trust_remote_code, **kwargs
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path: {model_config.model_type!r} is not an image-text-to-text model that transformers can "
            f"build ({error})"
        ) from error


# --- one half ---------------------------------------------------------------------------------------------------------


def load_part(
    model: Any,
    table: dict[str, Module],
    part: frozenset[Module],
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Fill the parameters of `part`, and all buffers, of a model built on meta; the rest stays on meta.

    Raises:
        ConfigError: the folder lacks a tensor of this part, or holds it in another shape.
    """
    files = weights.weight_files(folder)
    places = _places(model)
    stored_as: dict[str, str] = {}
    for name, module in table.items():
        if module in part:
            stored_as[name] = _stored_name(name, places[name], files, folder)
    names = {stored: name for name, stored in stored_as.items()}
    for stored, tensor in weights.read_tensors(files, names):
        name = names[stored]
        expected = model.get_parameter(name).shape
        if tensor.shape != expected:
            raise ConfigError(
                f"{files[stored]}: {stored} has shape {tuple(tensor.shape)}, config.json asks for {tuple(expected)}; "
                "the weights belong to another model"
            )
        parameter = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True))
        for place in places[name]:
            _set_parameter(model, place, parameter)
    for name, parameter in model.named_parameters():
        if table[name] not in part:
            parameter.requires_grad_(False)
    _fill_buffers(model, files, device)


def _places(model: nn.Module) -> dict[str, list[str]]:
    """First name of every parameter → all its names (more than one where it is tied)."""
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return places


def _stored_name(name: str, aliases: Iterable[str], files: dict[str, Path], folder: Path) -> str:
    for alias in (name, *aliases):
        if alias in files:
            return alias
    raise ConfigError(f"{folder}: the weights lack {name}; fetch the model folder again, or set model.init: random")


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _fill_buffers(model: Any, files: dict[str, Path], device: torch.device) -> None:
    """Buffers are small, whole on either side: from the file where it holds them, else as the model computes them."""
    names = [name for name, _ in model.named_buffers()]
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[attribute] = torch.empty_like(module._buffers[attribute], device="cpu")
        module._is_hf_initialized = False
    model.initialize_weights()
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
                    f"model.path: {path}.{attribute} is a tensor that cannot be loaded for one half alone"
                )


# --- whole-model weights ----------------------------------------------------------------------------------------------


def ensure_weights(config: Config) -> Path:
    """The folder with whole-model weights under the names of this transformers release.

    That is the model folder itself where its tensors have these names; else RUN_DIR/init, made once: from the seed when
    there are no weights (or `model.init: random`), or converted by transformers. A RUN_DIR/init made for the same model
    and seed is used again.
    """
    model_dir, init = config.model.path, config.model.init
    present = weights.has_weights(model_dir)
    if init == "pretrained" and not present:
        raise ConfigError(
            f"model.init: pretrained, but {model_dir} has no safetensors weights; add them, or use random"
        )
    model_config = read_config(model_dir, config.model.trust_remote_code)
    meta = build_on_meta(model_config, config.model.trust_remote_code)
    random = init == "random" or not present
    if not random and _names_agree(meta, model_dir):
        return model_dir
    folder = config.run.dir / "init"
    record = _record(config, model_config, random)
    if _read_record(folder) == record:
        return folder
    model = _random_model(config, model_config) if random else _converted_model(config)
    _write_whole(model, folder, record)
    return folder


def _names_agree(meta: nn.Module, folder: Path) -> bool:
    files = weights.weight_files(folder)
    places = _places(meta)
    known = {name for names in places.values() for name in names} | {name for name, _ in meta.named_buffers()}
    return files.keys() <= known and all(any(name in files for name in names) for names in places.values())


def _random_model(config: Config, model_config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        return _from_config(model_config, config.model.trust_remote_code)


def _converted_model(config: Config) -> Any:
    """Let transformers map an older layout of names; any tensor missing or left over stops the run."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        config.model.path,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=config.model.trust_remote_code,
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind, ()))
        if names:
            raise ConfigError(
                f"{config.model.path}: {len(names)} {kind.replace('_', ' ')} in the weights, first {names[0]}; "
                "the weights do not belong to config.json: fetch the folder again, or set model.init: random"
            )
    return model


def _write_whole(model: nn.Module, folder: Path, record: dict[str, object]) -> None:
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    weights.write_tensors(tensors, aside / weights.SINGLE_NAME)
    weights.write_json(record, aside / RECORD_NAME)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _record(config: Config, model_config: Any, random: bool) -> dict[str, object]:
    """What RUN_DIR/init was made from."""
    text = json.dumps(model_config.to_diff_dict(), sort_keys=True, default=str)
    files = [] if random else sorted(set(weights.weight_files(config.model.path).values()))
    return {
        "source": f"seed {config.run.seed}"
        if random
        else [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files],
        "model": hashlib.sha256(text.encode()).hexdigest(),
    }


def _read_record(folder: Path) -> object:
    path = folder / RECORD_NAME
    if not path.is_file() or not weights.has_weights(folder):
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
