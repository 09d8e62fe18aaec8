"""Module shapes, read from the `config.json` of a Hugging Face model folder and nothing else (no torch, contract C14).

    config.json ──read_shape──▶ ModelShape ─┬─ features(cut) ──▶ what crosses the cut, for pool and plan
                                            ├─ parameters(module)
                                            └─ text, vision ──▶ `flowtrain.flops`

Qwen3-VL is read exactly. Any other folder with a `vision_config` and a `text_config` is read by the names that
transformers' configs share, with a projector of two linear layers: good for costs and shares, not to the last
parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError
from flowtrain.types import Cut, FeatureSpec, Module, TensorSpec

ALIGNMENT = 64
"""Tensors of a block start at multiples of this many bytes: a cache line."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

QWEN3_VL = "qwen3_vl"

CUT_FAMILIES = frozenset({QWEN3_VL})
"""`model_type` of the families that can be cut in two, so that others are refused without loading torch."""


@dataclass(frozen=True, slots=True)
class TextShape:
    """The backbone: decoder layers with grouped-query attention and an MLP of three (gated) or two matrices."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    tied: bool
    gated: bool = True
    attention_bias: bool = False
    head_norms: bool = False

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer; each takes part in one multiply-add a token."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim + self.hidden if self.attention_bias else 0
        head = 0 if self.tied else self.head_weights
        return self.layers * (self.layer_weights + norms + biases) + self.hidden + self.head_weights + head


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The encoder: patches of `patch_values` numbers, `layers` layers that attend within an image or, in all but
    `full_layers` of them, within windows of `window_patches` (None: no windows)."""

    hidden: int
    layers: int
    heads: int
    mlp_width: int
    gated: bool
    patch_values: int
    num_positions: int
    full_layers: int
    window_patches: int | None = None

    @property
    def embed_weights(self) -> int:
        return self.patch_values * self.hidden

    @property
    def layer_weights(self) -> int:
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def parameters(self) -> int:
        biases = 4 * self.hidden + self.mlp_width * (2 if self.gated else 1) + self.hidden
        layer = self.layer_weights + biases + 4 * self.hidden
        return self.embed_weights + self.hidden + self.num_positions * self.hidden + self.layers * layer


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """`num_mergers` two-layer mergers, each from `patches_per_token` patches of the encoder to one token."""

    num_mergers: int
    patches_per_token: int
    width_in: int
    width_out: int
    width_between: int
    norm_parameters: int

    @property
    def weights(self) -> int:
        """Numbers in the matrices of all mergers; each takes part in one multiply-add a visual token."""
        return self.num_mergers * (self.width_in + self.width_out) * self.width_between

    @property
    def parameters(self) -> int:
        return self.weights + self.num_mergers * (self.width_between + self.width_out) + self.norm_parameters


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole vision-language model. `family` is the `model_type` of its config."""

    family: str
    text: TextShape
    vision: VisionShape
    projector: ProjectorShape
    image_token_id: int

    def features(self, cut: Cut) -> tuple[FeatureSpec, ...]:
        """The tensors of one sample that cross the cut, in order; Qwen3-VL: last level, then each deep-stack one."""
        after = cut is Cut.AFTER_PROJECTOR
        spec = FeatureSpec("token", self.projector.width_out) if after else FeatureSpec("patch", self.vision.hidden)
        return (spec,) * self.projector.num_mergers

    def parameters(self, module: Module) -> int:
        """Number of parameters of a module, tied ones once."""
        of_module = {
            Module.ENCODER: self.vision.parameters,
            Module.PROJECTOR: self.projector.parameters,
            Module.BACKBONE: self.text.parameters,
        }
        return of_module[module]


def feature_specs(features: Sequence[FeatureSpec], dtype: str, tokens: int, patches: int) -> tuple[TensorSpec, ...]:
    """Where each feature tensor of a sample lies in its block.

    >>> feature_specs((FeatureSpec("token", 3), FeatureSpec("token", 3)), "float32", tokens=2, patches=8)
    (TensorSpec(offset=0, shape=(2, 3), dtype='float32'), TensorSpec(offset=64, shape=(2, 3), dtype='float32'))
    """
    specs, end = [], 0
    for rows, width in features:
        spec = TensorSpec(_aligned(end), (tokens if rows == "token" else patches, width), dtype)
        specs.append(spec)
        end = spec.offset + _tensor_bytes(spec)
    return tuple(specs)


def payload_bytes(features: Sequence[FeatureSpec], dtype: str, tokens: int, patches: int) -> int:
    """Bytes of a sample's payload: the end of its last tensor, rounded up to whole cache lines."""
    specs = feature_specs(features, dtype, tokens, patches)
    return _aligned(specs[-1].offset + _tensor_bytes(specs[-1])) if specs else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


# --- reading config.json ----------------------------------------------------------------------------------------------


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
    vision = _vision(vision_keys, family)
    image_token = values.get("image_token_id", values.get("image_token_index"))
    if not isinstance(image_token, int) or isinstance(image_token, bool):
        raise ConfigError(f"{file} has no `image_token_id`: add the id of the image placeholder token")
    return ModelShape(family, text, vision, _projector(vision_keys, family, vision, text), image_token)


def check_family(family: str) -> None:
    """ConfigError, naming the family, unless its models can be cut in two."""
    if family not in CUT_FAMILIES:
        raise ConfigError(
            f"model.path: models of the family {family!r} cannot be cut in two yet; "
            f"supported: {', '.join(sorted(CUT_FAMILIES))}"
        )


def _text(keys: _Keys, family: str, top: _Keys) -> TextShape:
    if keys.values.get("num_experts") or keys.values.get("num_local_experts"):
        raise ConfigError(f"{keys.file}: mixture-of-experts backbones are not supported: choose a dense model")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return TextShape(
        hidden=hidden,
        layers=keys.size("num_hidden_layers"),
        heads=heads,
        kv_heads=keys.size("num_key_value_heads", default=heads),
        head_dim=keys.size("head_dim", default=max(1, hidden // heads)),
        mlp_width=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        # The top level decides where both are given: transformers ties by the whole model's config.
        tied=top.flag("tie_word_embeddings", keys.flag("tie_word_embeddings", False)),
        attention_bias=keys.flag("attention_bias", False),
        head_norms=family == QWEN3_VL,
    )


def _vision(keys: _Keys, family: str) -> VisionShape:
    patch = keys.size("patch_size", "spatial_patch_size")
    frames = keys.size("temporal_patch_size", default=1)
    hidden = keys.size("embed_dim") if "embed_dim" in keys.values else keys.size("hidden_size")
    layers = keys.size("depth", "num_hidden_layers")
    window_pixels = keys.values.get("window_size")
    full = keys.values.get("fullatt_block_indexes")
    windows = isinstance(window_pixels, int) and isinstance(full, list)
    image_side = keys.values.get("image_size")
    positions = (image_side // patch) ** 2 if isinstance(image_side, int) else 0
    return VisionShape(
        hidden=hidden,
        layers=layers,
        heads=keys.size("num_heads", "num_attention_heads"),
        mlp_width=keys.size("intermediate_size", default=round(hidden * float(keys.values.get("mlp_ratio", 4)))),
        gated=family.startswith("qwen2_5_vl"),
        patch_values=keys.size("in_channels", "in_chans", "num_channels", default=3) * frames * patch**2,
        num_positions=keys.size("num_position_embeddings", default=2304) if family == QWEN3_VL else positions,
        full_layers=len(full) if windows and full is not None else layers,
        window_patches=(window_pixels // patch) ** 2 if windows and window_pixels is not None else None,
    )


def _projector(keys: _Keys, family: str, vision: VisionShape, text: TextShape) -> ProjectorShape:
    patches_per_token = keys.size("spatial_merge_size", default=1) ** 2
    width_in = vision.hidden * patches_per_token
    if family != QWEN3_VL:
        between = width_in if patches_per_token > 1 else text.hidden
        return ProjectorShape(1, patches_per_token, width_in, text.hidden, between, 0)
    levels = keys.values.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(levels, list):
        raise ConfigError(f"{keys.file}: `{keys.path}deepstack_visual_indexes` is {levels!r}: expected a list")
    # The last merger norms single patches; those of the deep-stack levels norm the joined ones.
    norms = 2 * vision.hidden + len(levels) * 2 * width_in
    width_out = keys.size("out_hidden_size", default=text.hidden)
    return ProjectorShape(1 + len(levels), patches_per_token, width_in, width_out, width_in, norms)
