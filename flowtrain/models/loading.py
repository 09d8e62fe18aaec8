"""Whole-model weights under the names of this transformers release, for both halves and the reference to load.

They are the model folder's own where they fit; else they are made once, from the seed or by conversion, in
RUN_DIR/init.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.models import weights
from flowtrain.models.parts import build_on_meta, check_backbone, from_config, places_of, read_config
from flowtrain.models.playback import find_parts
from flowtrain.types import Cut

RECORD_NAME = "init.json"


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
    check_backbone(model_config)
    meta = build_on_meta(model_config, config.model.trust_remote_code)
    if config.cut is Cut.BEFORE_PROJECTOR:
        find_parts(meta)
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
    places = places_of(meta)
    known = {name for names in places.values() for name in names} | {name for name, _ in meta.named_buffers()}
    return files.keys() <= known and all(any(name in files for name in names) for names in places.values())


def _random_model(config: Config, model_config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        return from_config(model_config, config.model.trust_remote_code)


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
