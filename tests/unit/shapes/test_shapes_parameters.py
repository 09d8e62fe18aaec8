"""Parameters read from config.json are those of transformers' own model, module by module, to the last one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes_configs import CONFIGS
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from flowtrain.errors import ConfigError
from flowtrain.models.table import module_of_name
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.shapes.families import FAMILIES
from flowtrain.types import Module


def shape_of(folder: Path, values: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(values))
    return read_shape(folder)


def real_parameters(values: dict[str, Any]) -> dict[Module, int]:
    """Counted in the model that transformers builds of the same file, on the meta device."""
    values = copy.deepcopy(values)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    counts = dict.fromkeys(Module, 0)
    for name, parameter in model.named_parameters():
        module = Module.ENCODER if "audio_tower" in name else module_of_name(name)
        assert module is not None, name
        counts[module] += parameter.numel()
    return counts


def parameters(shape: ModelShape) -> dict[Module, int]:
    return {module: shape.parameters(module) for module in Module}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_tiny_models(tmp_path: Path, family: str) -> None:
    assert parameters(shape_of(tmp_path, CONFIGS[family])) == real_parameters(CONFIGS[family])


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key that changes the number of parameters, away from the tiny models' choice."""

    def changed(family: str, **sections: Any) -> tuple[str, dict[str, Any]]:
        values = copy.deepcopy(CONFIGS[family])
        for name, value in sections.items():
            values[name] = {**values[name], **value} if isinstance(value, dict) else value
        return f"{family}-{'-'.join(sections)}", values

    yield changed("qwen2_vl", text_config={"tie_word_embeddings": True})
    yield changed("qwen3_vl", tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    yield changed("qwen3_vl_moe", text_config={"decoder_sparse_step": 1, "mlp_only_layers": []})
    yield changed("qwen3_5", text_config={"layer_types": ["full_attention", "linear_attention"] * 2})
    yield changed("internvl", vision_config={"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False})
    yield changed("internvl", vision_config={"use_absolute_position_embeddings": False}, downsample_ratio=0.25)
    yield changed("llava", text_config={"attention_bias": True, "mlp_bias": True}, multimodal_projector_bias=False)
    yield changed("llava", text_config={"tie_word_embeddings": True}, vision_feature_layer=[-1, -2])
    yield changed("llava_next", text_config={"tie_word_embeddings": True})
    yield changed("llava_onevision", vision_config={"vision_use_head": True})
    yield changed("gemma3", text_config={"attention_bias": True}, tie_word_embeddings=False)
    yield changed("mistral3", multimodal_projector_bias=True, spatial_merge_size=4)
    yield changed("glm4v_moe", text_config={"n_shared_experts": 1, "attention_bias": False})
    yield changed("aya_vision", downsample_factor=1)


@pytest.mark.parametrize("values", [pytest.param(values, id=name) for name, values in variants()])
def test_every_key_that_changes_them(tmp_path: Path, values: dict[str, Any]) -> None:
    assert parameters(shape_of(tmp_path, values)) == real_parameters(values)


def test_every_family_is_covered() -> None:
    # The two others are files that wrap or rename one of these: they are tested against it.
    assert FAMILIES.keys() - CONFIGS.keys() == {"qwen2_5_omni", "internvl_chat"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma3", "aya_vision", "qwen2_5_omni", "internvl_chat"}))
def test_a_file_with_nothing_but_the_family(tmp_path: Path, family: str) -> None:
    """Sections and keys that are absent have transformers' defaults. (Those of gemma3 and aya_vision make no model.)"""
    values = {"model_type": family}
    assert parameters(shape_of(tmp_path, values)) == real_parameters(values)


def test_keys_of_the_text_at_the_top_level(tmp_path: Path) -> None:
    """As older files of Qwen2-VL and Qwen2.5-VL have them."""
    nested = CONFIGS["qwen2_5_vl"]
    flat = {**{key: value for key, value in nested["text_config"].items() if key != "model_type"}, **nested}
    del flat["text_config"]
    assert shape_of(tmp_path, flat) == shape_of(tmp_path, nested)


def test_the_whole_omni_model_is_its_thinker(tmp_path: Path) -> None:
    thinker = CONFIGS["qwen2_5_omni_thinker"]
    whole = shape_of(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker})
    assert parameters(whole) == parameters(shape_of(tmp_path, thinker))
    assert [encoder.name for encoder in whole.encoders] == ["vision", "audio"]


def test_the_chat_format_of_internvl_is_the_same_model(tmp_path: Path) -> None:
    """Its own names for the same sizes, and the head tied as the language model's section says."""
    ours = CONFIGS["internvl"]
    vision = {key: ours["vision_config"][key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    chat = {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
        "llm_config": {**ours["text_config"], "tie_word_embeddings": True},
        "vision_config": {
            **vision,
            "model_type": "intern_vit_6b",
            "intermediate_size": 56,
            "image_size": 16,
            "patch_size": 4,
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
        },
    }
    expected = real_parameters({**ours, "tie_word_embeddings": True})
    assert parameters(shape_of(tmp_path, chat)) == expected


@pytest.mark.parametrize("family", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - FAMILIES.keys()))
def test_any_other_family_is_estimated_or_refused(tmp_path: Path, family: str) -> None:
    """Whatever transformers would write for it: a marked estimate, or a sentence with file and key."""
    (tmp_path / "config.json").write_text(AutoConfig.for_model(family).to_json_string(use_diff=False))
    try:
        shape = read_shape(tmp_path)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_shape(tmp_path)
    else:
        assert shape.generic
        assert min(parameters(shape).values()) > 0


PLANS = {
    "internvl3-8b": 7_944_373_760,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-8b": 8_767_123_696,
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_real_models(repository: Path, name: str) -> None:
    """By us, by transformers, and as the README of the folder says."""
    folder = repository / "examples/plans" / name
    shape = read_shape(folder)
    assert not shape.generic
    assert parameters(shape) == real_parameters(json.loads((folder / "config.json").read_text()))
    assert sum(parameters(shape).values()) == PLANS[name]
    assert f"`{name}`" in (readme := (folder.parent / "README.md").read_text())
    assert f"{PLANS[name]:,}" in readme
