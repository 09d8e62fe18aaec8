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
from flowtrain.shapes import DTYPE_BYTES, feature_specs, payload_bytes, read_shape
from flowtrain.types import Cut, FeatureSpec, Module

LLAVA: dict[str, Any] = {
    "model_type": "llava",
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


def test_untied_heads_and_biases_count(repository: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = json.loads((repository / "examples/emoji/model/config.json").read_text())
    values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = False
    values["text_config"]["attention_bias"] = True
    values["vision_config"]["deepstack_visual_indexes"] = [1]
    folder = write(tmp_path, values)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    shape = read_shape(folder)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert sum(shape.parameters(module) for module in Module) == whole


def test_features_of_qwen3_vl(emoji: Path) -> None:
    shape = read_shape(emoji / "model")
    assert shape.family == "qwen3_vl"
    assert shape.features(Cut.AFTER_PROJECTOR) == (FeatureSpec("token", 128),) * 3
    assert shape.features(Cut.BEFORE_PROJECTOR) == (FeatureSpec("patch", 96),) * 3


def test_other_families_by_shared_names(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, LLAVA))
    assert shape.features(Cut.AFTER_PROJECTOR) == (FeatureSpec("token", 64),)
    assert shape.features(Cut.BEFORE_PROJECTOR) == (FeatureSpec("patch", 32),)
    assert (shape.text.kv_heads, shape.text.head_dim, shape.image_token_id) == (4, 16, 9)
    assert (shape.projector.patches_per_token, shape.vision.outer_vectors) == (1, 32 + 16 * 32)
    assert shape.generic


def test_windows_of_qwen2_5_vl(tmp_path: Path) -> None:
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 96,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [3],
        "spatial_merge_size": 2,
    }
    shape = read_shape(write(tmp_path, {**LLAVA, "model_type": "qwen2_5_vl", "vision_config": vision}))
    assert (shape.vision.full_layers, shape.vision.window_patches, shape.vision.gated) == (1, 64, True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    def message(values: Any) -> str:
        with pytest.raises(ConfigError) as error:
            read_shape(write(tmp_path, values))
        return str(error.value)

    with pytest.raises(ConfigError, match=r"cannot read .*absent/config\.json: No such file"):
        read_shape(tmp_path / "absent")
    assert "is not JSON" in message("{")
    assert "no mapping" in message("[]")
    assert "no section `text_config`" in message({"vision_config": {}})
    assert "no section `vision_config`" in message({**LLAVA, "vision_config": None})
    text = LLAVA["text_config"]
    assert "no `text_config.hidden_size`" in message(
        {**LLAVA, "text_config": {k: v for k, v in text.items() if k != "hidden_size"}}
    )
    assert "`text_config.hidden_size` is -1" in message({**LLAVA, "text_config": {**text, "hidden_size": -1}})
    assert "mixture-of-experts" in message({**LLAVA, "text_config": {**text, "num_experts": 8}})
    assert "image_token_id" in message({**LLAVA, "image_token_index": None})


features_lists = st.lists(
    st.builds(FeatureSpec, st.sampled_from(["token", "patch"]), st.integers(1, 40)), min_size=1, max_size=5
)


@given(features_lists, st.sampled_from(sorted(DTYPE_BYTES)), st.integers(0, 50), st.integers(0, 200))
def test_tensors_are_aligned_and_apart(features: list[FeatureSpec], dtype: str, tokens: int, patches: int) -> None:
    specs = feature_specs(features, dtype, tokens, patches)
    end = 0
    for spec, (rows, width) in zip(specs, features, strict=True):
        assert spec.shape == ((tokens if rows == "token" else patches), width)
        assert spec.offset % 64 == 0
        assert end <= spec.offset < end + 64
        end = spec.offset + prod(spec.shape) * DTYPE_BYTES[dtype]
    size = payload_bytes(features, dtype, tokens, patches)
    assert size % 64 == 0
    assert end <= size < end + 64
