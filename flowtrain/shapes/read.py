"""Reading a model's shape from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError
from flowtrain.shapes.encoder import EncoderShape, ProjectorShape
from flowtrain.shapes.model import QWEN3_VL, ModelShape
from flowtrain.shapes.text import TextShape


class _Keys:
    """One section of a config.json; a missing or ill-typed key is told with file and key path."""

    def __init__(self, file: Path, path: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.path = path
        self.values = values

    def section(self, *names: str) -> _Keys:
        for name in names:
            if isinstance(value := self.values.get(name), dict):
                return _Keys(self.file, f"{self.path}{name}.", value)
        raise ConfigError(
            f"{self.file} has no section `{names[0]}`: model.path must be the folder of a vision-language model"
        )

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of these names that is there."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list) and value and all(side == value[0] for side in value):
                value = value[0]
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{self.file}: `{self.path}{name}` is {value!r}: expected a positive whole number")
            return value
        if default is None:
            raise ConfigError(f"{self.file} has no `{self.path}{names[0]}`: add it, from the model's own config")
        return default

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.values.get(name, default))


def read_shape(model_dir: Path) -> ModelShape:
    """Shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: `config.json` is missing, is not JSON, or lacks a size; the sentence names file and key.
    """
    file = Path(model_dir) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; set model.path to a Hugging Face folder") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}; fix it or set model.path to another folder") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no mapping at its top level: set model.path to a Hugging Face folder")
    top = _Keys(file, "", values)
    family = str(values.get("model_type", ""))
    text = _text(top.section("text_config", "llm_config"), family, top)
    vision_keys = top.section("vision_config")
    vision = _vision(vision_keys, family, text)
    image_token = values.get("image_token_id", values.get("image_token_index"))
    if not isinstance(image_token, int) or isinstance(image_token, bool):
        raise ConfigError(f"{file} has no `image_token_id`: add the id of the image placeholder token")
    return ModelShape(family, text, (vision,), image_token, generic=family != QWEN3_VL)


def _text(keys: _Keys, family: str, top: _Keys) -> TextShape:
    if keys.values.get("num_experts") or keys.values.get("num_local_experts"):
        raise ConfigError(f"{keys.file}: mixture-of-experts backbones are not supported: choose a dense model")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    head_dim = keys.size("head_dim", default=max(1, hidden // heads))
    biases = (heads + 2 * kv_heads) * head_dim + hidden if keys.flag("attention_bias", False) else 0
    return TextShape(
        hidden=hidden,
        layers=keys.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        # The top level decides where both are given: transformers ties by the whole model's config.
        tied=top.flag("tie_word_embeddings", keys.flag("tie_word_embeddings", False)),
        layer_vectors=2 * hidden + biases + (2 * head_dim if family == QWEN3_VL else 0),
        outer_vectors=hidden,
    )


def _vision(keys: _Keys, family: str, text: TextShape) -> EncoderShape:
    patch = keys.size("patch_size", "spatial_patch_size")
    frames = keys.size("temporal_patch_size", default=1)
    hidden = keys.size("embed_dim") if "embed_dim" in keys.values else keys.size("hidden_size")
    layers = keys.size("depth", "num_hidden_layers")
    window_pixels = keys.values.get("window_size")
    full = keys.values.get("fullatt_block_indexes")
    windows = isinstance(window_pixels, int) and isinstance(full, list)
    image_side = keys.values.get("image_size")
    positions = (image_side // patch) ** 2 if isinstance(image_side, int) else 0
    if family == QWEN3_VL:
        positions = keys.size("num_position_embeddings", default=2304)
    gated = family.startswith("qwen2_5_vl")
    mlp_width = keys.size("intermediate_size", default=round(hidden * float(keys.values.get("mlp_ratio", 4))))
    patch_values = keys.size("in_channels", "in_chans", "num_channels", default=3) * frames * patch**2
    return EncoderShape(
        name="vision",
        modality="vision",
        hidden=hidden,
        layers=layers,
        heads=keys.size("num_heads", "num_attention_heads"),
        attention_width=hidden,
        mlp_width=mlp_width,
        gated=gated,
        patch_values=patch_values,
        embed_weights=patch_values * hidden,
        layer_vectors=4 * hidden + mlp_width * (2 if gated else 1) + hidden + 4 * hidden,
        outer_vectors=hidden + positions * hidden,
        full_layers=len(full) if windows and full is not None else layers,
        window_patches=(window_pixels // patch) ** 2 if windows and window_pixels is not None else None,
        projector=_projector(keys, family, hidden, text),
    )


def _projector(keys: _Keys, family: str, hidden: int, text: TextShape) -> ProjectorShape:
    patches_per_token = keys.size("spatial_merge_size", default=1) ** 2
    width_in = hidden * patches_per_token
    if family != QWEN3_VL:
        between = width_in if patches_per_token > 1 else text.hidden
        weights = (width_in + text.hidden) * between
        return ProjectorShape(1, patches_per_token, text.hidden, weights, between + text.hidden)
    levels = keys.values.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(levels, list):
        raise ConfigError(f"{keys.file}: `{keys.path}deepstack_visual_indexes` is {levels!r}: expected a list")
    width_out = keys.size("out_hidden_size", default=text.hidden)
    mergers = 1 + len(levels)
    # The last merger norms single patches; those of the deep-stack levels norm the joined ones.
    norms = 2 * hidden + len(levels) * 2 * width_in
    weights = mergers * (width_in + width_out) * width_in
    return ProjectorShape(mergers, patches_per_token, width_out, weights, mergers * (width_in + width_out) + norms)
