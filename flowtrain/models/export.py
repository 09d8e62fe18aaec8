"""The trained model as a Hugging Face folder: what the user takes home.

    producer  ── write_part ──▶ FOLDER/parts/producer-N.safetensors ─┐
    consumer  ── write_part ──▶ FOLDER/parts/consumer-N.safetensors ─┴─ finish_export ──▶ model*.safetensors, index,
    model folder: config.json, generation_config.json, tokenizer, processor, chat template ──▶ copied beside them

Each side writes its own tensors under the whole model's names, frozen ones too; nothing goes through a single process.
The folder loads with transformers' Auto classes, offline, nothing missing and nothing left over. Tied tensors are
stored once, as the source model has them. Weights that are not finite are refused: a broken run must not look like a
trained model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from flowtrain.errors import ConfigError
from flowtrain.models import weights
from flowtrain.models.parts import build_on_meta, read_config, stored_buffers
from flowtrain.models.table import module_of_parameters

SHARD_BYTES = 4 * 2**30
PARTS_NAME = "parts"
COPIED_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"})
COPIED_NAMES = frozenset({"LICENSE", "NOTICE"})
STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_part(parameters: Mapping[str, torch.Tensor], folder: Path, part_name: str) -> None:
    """Write one side's tensors, parameters in float32, as files of at most `SHARD_BYTES` under FOLDER/parts.

    Raises:
        ConfigError: a parameter is not finite; nothing is written then.
    """
    check_finite(parameters, part_name)
    parts = folder / PARTS_NAME
    for stale in parts.glob(f"{part_name}-*.safetensors"):
        stale.unlink()
    for number, names in enumerate(_shards(parameters)):
        tensors = {name: _on_host(parameters[name]) for name in names}
        weights.write_tensors(tensors, parts / f"{part_name}-{number}.safetensors")


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if isinstance(tensor, nn.Parameter) else tensor.dtype
    return tensor.detach().to("cpu", dtype)


def check_finite(parameters: Mapping[str, torch.Tensor], part_name: str) -> None:
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise ConfigError(
                f"{part_name}: parameter {name} holds numbers that are not finite, so nothing is exported; "
                "lower train.lr and resume from an earlier checkpoint"
            )


def finish_export(model_dir: Path, folder: Path, parts: Sequence[str], trust_remote_code: bool = False) -> None:
    """Join the parts into one model folder, with all that the model folder has besides weights.

    Weights get the dtype that config.json names (float32 where it names none). The index comes last, so that
    a folder cut short does not load.

    Raises:
        ConfigError: the parts together are not exactly the model's parameters, each once.
    """
    files = sorted(path for part in parts for path in (folder / PARTS_NAME).glob(f"{part}-*.safetensors"))
    held = {path: list(weights.tensor_names(path)) for path in files}
    _check_once(folder, held)
    buffers = _check_complete(model_dir, [name for names in held.values() for name in names], trust_remote_code)
    dtype = _stored_dtype(model_dir)
    for stale in (*folder.glob("model*.safetensors"), folder / weights.INDEX_NAME):
        stale.unlink(missing_ok=True)
    _copy_rest(model_dir, folder, dtype)
    shard_of: dict[str, str] = {}
    total_bytes = 0
    for number, (path, names) in enumerate(held.items(), start=1):
        shard = f"model-{number:05d}-of-{len(held):05d}.safetensors"
        tensors = dict(weights.read_tensors(dict.fromkeys(names, path), names))
        tensors = {name: tensor if name in buffers else tensor.to(dtype) for name, tensor in tensors.items()}
        weights.write_tensors(tensors, folder / shard)
        total_bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        shard_of.update(dict.fromkeys(names, shard))
    weights.write_json({"metadata": {"total_size": total_bytes}, "weight_map": shard_of}, folder / weights.INDEX_NAME)
    shutil.rmtree(folder / PARTS_NAME)


def _shards(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        num_bytes = parameter.numel() * torch.float32.itemsize
        if names and size + num_bytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names


def _check_once(folder: Path, held: Mapping[Path, Sequence[str]]) -> None:
    """Two writers of a tensor may differ, and the later one would win unseen."""
    writers: dict[str, list[str]] = {}
    for path, names in held.items():
        for name in names:
            writers.setdefault(name, []).append(path.stem.rpartition("-")[0])
    twice = {name: by for name, by in writers.items() if len(by) > 1}
    if twice:
        name, by = next(iter(twice.items()))
        others = f" (as were {len(twice) - 1} others)" if len(twice) > 1 else ""
        raise ConfigError(
            f"export: {name} was written by {' and by '.join(by)}{others}, and each tensor has one writer; remove "
            f"{folder}, where parts of an earlier export may have been left, and resume the run; if it is told again, "
            f"report it with both layouts and the model's config.json"
        )


def _check_complete(model_dir: Path, names: Sequence[str], trust_remote_code: bool) -> frozenset[str]:
    """The names of those that are buffers, which keep their dtype."""
    meta = build_on_meta(read_config(model_dir, trust_remote_code), trust_remote_code)
    expected = set(module_of_parameters(meta)) | stored_buffers(meta).keys()
    missing, extra = sorted(expected - set(names)), sorted(set(names) - expected)
    if missing or extra:
        first = (missing or extra)[0]
        raise ConfigError(
            f"export: {len(missing)} of the model's parameters were not written and {len(extra)} are not its own, "
            f"first {first}; the parts do not belong to {model_dir}"
        )
    return frozenset(stored_buffers(meta))


def _stored_dtype(model_dir: Path) -> torch.dtype:
    config = _config_json(model_dir)
    name = config.get("dtype") or config.get("torch_dtype")
    return STORED_DTYPES.get(str(name), torch.float32)


def _config_json(model_dir: Path) -> dict[str, object]:
    value = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _copy_rest(model_dir: Path, folder: Path, dtype: torch.dtype) -> None:
    """Everything a user needs besides weights; `config.json` names the dtype that the weights have."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and (path.suffix in COPIED_SUFFIXES or path.stem in COPIED_NAMES):
            if not path.name.endswith(".index.json"):
                aside = folder / (path.name + ".tmp")
                shutil.copyfile(path, aside)
                os.replace(aside, folder / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    config = _config_json(model_dir)
    _name_dtype(config, str(dtype).removeprefix("torch."))
    for value in config.values():
        if isinstance(value, dict) and {"dtype", "torch_dtype"} & value.keys():
            _name_dtype(value, str(dtype).removeprefix("torch."))
    weights.write_json(config, folder / "config.json")


def _name_dtype(config: dict[str, object], name: str) -> None:
    config.pop("torch_dtype", None)
    config["dtype"] = name
