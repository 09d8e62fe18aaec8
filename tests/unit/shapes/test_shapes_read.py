"""Shapes from config.json: exact against the real model, told apart from what is missing, features at both cuts."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.shapes import DTYPE_BYTES, Mixer, feature_specs, payload_bytes, read_shape
from flowtrain.types import Cut, FeatureSpec, Module

OTHER: dict[str, Any] = {
    "model_type": "other_vl",
    "image_token_index": 9,
    "text_config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    },
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "patch_size": 14,
        "image_size": 56,
    },
}


def write(folder: Path, values: Any) -> Path:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


@pytest.mark.parametrize("example", ["digits", "emoji"])
def test_parameters_are_those_of_the_real_model(repository: Path, example: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from flowtrain.models.table import module_of_parameters

    folder = repository / "examples" / example / "model"
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    counts = dict.fromkeys(Module, 0)
    parameters = dict(model.named_parameters())
    for name, module in module_of_parameters(model).items():
        counts[module] += parameters[name].numel()
    shape = read_shape(folder)
    assert {module: shape.parameters(module) for module in Module} == counts


def test_features_of_qwen3_vl(emoji: Path) -> None:
    shape = read_shape(emoji / "model")
    assert shape.family == "qwen3_vl"
    assert shape.features(Cut.AFTER_PROJECTOR) == (FeatureSpec("token", 128),) * 3
    assert shape.features(Cut.BEFORE_PROJECTOR) == (FeatureSpec("patch", 96),) * 3


def test_unknown_families_are_read_by_shared_names_and_marked(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, OTHER))
    assert shape.generic
    assert shape.features(Cut.AFTER_PROJECTOR) == (FeatureSpec("token", 64),)
    assert shape.features(Cut.BEFORE_PROJECTOR) == (FeatureSpec("patch", 32),)
    assert (shape.text.kv_heads, shape.text.head_dim, shape.image_token_id) == (4, 16, 9)
    assert (shape.projector.patches_per_token, shape.projector.weights) == (1, 32 * 64 + 64 * 64)
    assert not read_shape(write(tmp_path, {**OTHER, "model_type": "llava"})).generic


def test_an_unknown_family_of_known_parts_is_read_by_their_kinds(tmp_path: Path) -> None:
    """Sizes that the sections leave out have the defaults of the kinds that they name."""
    values = {
        "model_type": "other_vl",
        "text_config": {"model_type": "qwen3", "num_hidden_layers": 2},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False},
    }
    shape = read_shape(write(tmp_path, values))
    assert (shape.text.hidden, shape.text.attention_vectors, shape.vision.hidden) == (4096, 2 * 128, 768)
    assert shape.image_token_id is None


def test_windows_of_qwen2_5_vl(tmp_path: Path) -> None:
    vision = {"depth": 4, "window_size": 112, "fullatt_block_indexes": [3], "patch_size": 14}
    shape = read_shape(write(tmp_path, {**OTHER, "model_type": "qwen2_5_vl", "vision_config": vision}))
    assert (shape.vision.full_layers, shape.vision.window_patches, shape.vision.gated) == (1, 64, True)


def test_layers_that_attend_within_windows(tmp_path: Path) -> None:
    def layers(text: dict[str, Any], family: str) -> tuple[int, int, int | None]:
        values = {
            **OTHER,
            "model_type": family,
            "text_config": {**OTHER["text_config"], "num_hidden_layers": 6, **text},
        }
        shape = read_shape(write(tmp_path, values)).text
        return shape.layers_with(Mixer.FULL), shape.layers_with(Mixer.WINDOW), shape.window

    late = {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 4}
    assert layers(late, "internvl") == (6, 0, None)
    assert layers({**late, "use_sliding_window": True}, "internvl") == (4, 2, 9)
    named = ["sliding_attention"] * 5 + ["full_attention"]
    assert layers({**late, "use_sliding_window": True, "layer_types": named}, "internvl") == (1, 5, 9)
    assert layers({"model_type": "mistral", "sliding_window": 9}, "mistral3") == (0, 6, 9)
    assert layers({"model_type": "mistral", "sliding_window": None}, "mistral3") == (6, 0, None)
    assert layers({"model_type": "mistral"}, "mistral3") == (0, 6, 4096)
    assert layers({"model_type": "gemma2", "sliding_window": 9}, "paligemma") == (3, 3, 9)
    assert layers({"model_type": "cohere2", "sliding_window": 9}, "aya_vision") == (1, 5, 9)
    with pytest.raises(ConfigError, match=r"`text_config\.layer_types` has 5 entries for 6 layers"):
        layers({"layer_types": named[:5]}, "internvl")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    def message(values: Any) -> str:
        with pytest.raises(ConfigError) as error:
            read_shape(write(tmp_path, values))
        return str(error.value)

    for family in ("other_vl", "llava"):
        told = message({**OTHER, "model_type": family, "vision_config": [1]})
        assert told.endswith("`vision_config` is [1]: expected a mapping")
    with pytest.raises(ConfigError, match=r"cannot read .*absent/config\.json: No such file"):
        read_shape(tmp_path / "absent")
    assert "is not JSON" in message("{")
    assert "no mapping" in message("[]")
    assert "no section `text_config`" in message({"vision_config": {}})
    assert "no section `vision_config`" in message({**OTHER, "vision_config": None})
    text = OTHER["text_config"]
    assert "no `text_config.hidden_size`" in message(
        {**OTHER, "text_config": {k: v for k, v in text.items() if k != "hidden_size"}}
    )
    assert "`text_config.hidden_size` is -1" in message({**OTHER, "text_config": {**text, "hidden_size": -1}})
    assert "no `text_config.num_experts_per_tok`" in message({**OTHER, "text_config": {**text, "num_experts": 8}})
    experts = {"num_experts": 8, "num_experts_per_tok": 9}
    assert "num_experts_per_tok` is 9, of 8 experts" in message({**OTHER, "text_config": {**text, **experts}})
    assert "`image_token_index` is 'x'" in message({**OTHER, "image_token_index": "x"})
    assert "layers without attention" in message({**OTHER, "text_config": {**text, "layer_types": ["mamba"] * 2}})
    vision = OTHER["vision_config"]
    assert "no `vision_config.patch_size`" in message(
        {**OTHER, "vision_config": {k: v for k, v in vision.items() if k != "patch_size"}}
    )
    assert "no section `thinker_config`" in message({"model_type": "qwen2_5_omni"})
    assert "`vision_feature_layer` is 9" in message({**OTHER, "model_type": "llava", "vision_feature_layer": 9})
    assert "does not divide the 16 patches" in message({**OTHER, "model_type": "gemma3", "mm_tokens_per_image": 5})


features_lists = st.lists(
    st.builds(FeatureSpec, st.sampled_from(["token", "patch"]), st.integers(1, 40), st.integers(0, 2), st.just(16)),
    min_size=1,
    max_size=5,
)


@given(features_lists, st.sampled_from(sorted(DTYPE_BYTES)), st.integers(0, 50), st.integers(0, 200))
def test_tensors_are_aligned_and_apart(features: list[FeatureSpec], dtype: str, tokens: int, patches: int) -> None:
    specs = feature_specs(features, dtype, tokens, patches)
    end = 0
    for spec, feature in zip(specs, features, strict=True):
        classes = feature.class_rows * len(range(0, patches, 16))
        assert spec.shape == (tokens if feature.rows == "token" else patches + classes, feature.width)
        assert spec.offset % 64 == 0
        assert end <= spec.offset < end + 64
        end = spec.offset + prod(spec.shape) * DTYPE_BYTES[dtype]
    size = payload_bytes(features, dtype, tokens, patches)
    assert size % 64 == 0
    assert end <= size < end + 64
