"""Every parameter of every family belongs to exactly one part (contract C4); a name that nobody claims is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import MODEL_DIR, load_halves
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError
from flowtrain.models.families import FAMILIES, family_of
from flowtrain.models.table import module_of_parameters, parameter_rows
from flowtrain.shapes import CUT_FAMILIES
from flowtrain.types import Module

FAMILY_MARKS = {
    "gemma3": ("multi_modal_projector", "vision_tower"),
    "glm4v": ("visual.merger", "visual.blocks"),
    "idefics3": ("connector", "vision_model"),
    "internvl": ("multi_modal_projector", "vision_tower"),
    "llava": ("multi_modal_projector", "vision_tower"),
    "llava_next": ("image_newline", "vision_tower"),
    "llava_onevision": ("image_newline", "vision_tower"),
    "mistral3": ("multi_modal_projector", "vision_tower"),
    "paligemma": ("multi_modal_projector", "vision_tower"),
    "qwen2_5_vl": ("visual.merger", "visual.blocks"),
    "qwen2_vl": ("visual.merger", "visual.blocks"),
    "qwen3_vl": ("deepstack_merger_list", "visual.blocks"),
    "smolvlm": ("connector", "vision_model"),
}
"""Family → names that must be found in its projector and in its encoder."""


@pytest.mark.parametrize("family", sorted(FAMILY_MARKS))
def test_each_parameter_has_one_part(family: str) -> None:
    model = _on_meta(AutoConfig.for_model(family))
    table = module_of_parameters(model)
    assert list(table) == [name for name, _ in model.named_parameters()]
    assert set(table.values()) == set(Module)
    in_projector, in_encoder = FAMILY_MARKS[family]
    of = {module: [name for name, owner in table.items() if owner is module] for module in Module}
    assert any(in_projector in name for name in of[Module.PROJECTOR])
    assert any(in_encoder in name for name in of[Module.ENCODER])
    assert not any("language_model" in name or "text_model.layers" in name for name in of[Module.ENCODER])
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    assert table[embedding] is Module.BACKBONE


def test_parts_of_qwen3_vl_are_counted() -> None:
    model = _on_meta(AutoConfig.from_pretrained(MODEL_DIR))
    table = module_of_parameters(model)
    visual = model.model.visual
    projector = {id(p) for m in (visual.merger, visual.deepstack_merger_list) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        in_visual = any(parameter is p for p in visual.parameters())
        expected = Module.PROJECTOR if id(parameter) in projector else Module.ENCODER if in_visual else Module.BACKBONE
        assert table[name] is expected, name


def test_start_up_rows_add_up_to_the_whole_model(make_config: Callable[..., Config], weights_dir: Path) -> None:
    config = make_config("float32", freeze=("encoder",))
    rows = [
        row
        for half in load_halves(config, weights_dir)
        for row in parameter_rows(half.parameters_by_name(), half.module_of())
    ]
    assert {row.module: row.trainable for row in rows} == {
        Module.ENCODER: False,
        Module.PROJECTOR: True,
        Module.BACKBONE: True,
    }
    stored = load_file(weights_dir / "model.safetensors").values()
    assert sum(row.count for row in rows) == sum(tensor.numel() for tensor in stored)
    assert all(row.bytes == 4 * row.count and row.dtype == "float32" for row in rows)


def test_a_name_that_nobody_claims_is_an_error() -> None:
    model = nn.ModuleDict({"visual": nn.Linear(1, 1), "audio_tower": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match=r"audio_tower\.weight belongs to no known part"):
        module_of_parameters(model)


def test_a_family_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'mllama' cannot be cut in two yet: images enter .* supported: .*qwen3_vl"):
        family_of("mllama")
    assert FAMILIES.keys() == CUT_FAMILIES, "what launch accepts is what can be cut"


def _on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)
