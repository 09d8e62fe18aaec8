"""FLOPs of every family against torch's own counter on a tiny model, term by term and exactly.

The counter sees attention as the full square where a kernel works with a mask: backbones are compared with the square
that the causal half and the windows are taken from. Rotary tables are products too; they are left out.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes_configs import CONFIGS
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from flowtrain.flops import backbone_flops, encoder_flops, projector_flops
from flowtrain.shapes import EncoderShape, Mixer, ModelShape, read_shape

ATTENTION = {"bmm", "baddbmm"}
TILES = 3
LENGTH = 24
LEFT_OUT = ("rotary", "rotary_emb", "rotary_pos_emb")


class Counted:
    """FLOPs of one call by operator, without those of the modules left out."""

    def __init__(self, model: Any, call: Callable[[], Any], left_out: tuple[str, ...] = ()) -> None:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        by_module = counter.get_flop_counts()
        self.by_operator: dict[str, int] = {}
        for module, counts in by_module.items():
            sign = 1 if module == "Global" else -1 if self._is_left_out(module, left_out) else 0
            for operator, flops in counts.items():
                name = str(operator).split(".")[-1]
                self.by_operator[name] = self.by_operator.get(name, 0) + sign * flops

    @staticmethod
    def _is_left_out(module: str, left_out: tuple[str, ...]) -> bool:
        """Whether it is the outermost module left out of its branch."""
        parts = module.split(".")
        inside = [i for i in range(1, len(parts) + 1) if _ends(".".join(parts[:i]), (*LEFT_OUT, *left_out))]
        return bool(inside) and inside[0] == len(parts)

    @property
    def attention(self) -> int:
        return sum(flops for name, flops in self.by_operator.items() if name in ATTENTION)

    @property
    def linear(self) -> int:
        return sum(flops for name, flops in self.by_operator.items() if name not in ATTENTION)


def _ends(module: str, endings: tuple[str, ...]) -> bool:
    return any(module.endswith(f".{ending}") for ending in endings)


def build(folder: Path, family: str) -> tuple[Any, ModelShape]:
    values = copy.deepcopy(CONFIGS[family])
    (folder / "config.json").write_text(json.dumps(values))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return model.eval(), read_shape(folder)


def encode(model: Any, family: str) -> tuple[Callable[[], Any], list[int]]:
    """A call of encoder and projector, and the patches of its images."""
    core = model.model
    if hasattr(core, "visual"):
        grids = [(1, 4, 8), (1, 8, 8)]
        patches = [rows * columns for _, rows, columns in grids]
        pixels = torch.zeros(sum(patches), 3 * 2 * 4 * 4)
        return lambda: core.visual(pixels, grid_thw=torch.tensor(grids)), patches
    if family == "mistral3":
        sizes = torch.tensor([[24, 16], [24, 16]])
        return lambda: core.get_image_features(torch.zeros(2, 3, 24, 16), image_sizes=sizes), [24, 24]
    pixels = torch.zeros(TILES, 3, 16, 16)
    if family in ("llava_next", "llava_onevision"):
        # Cut into tiles by the processor: features are put together without a product.
        return lambda: core.multi_modal_projector(_tower(core, pixels)), [TILES * 16]
    if family in ("idefics3", "smolvlm"):
        return lambda: core.get_image_features(torch.rand(1, TILES, 3, 16, 16)), [TILES * 16]
    return lambda: core.get_image_features(pixel_values=pixels), [TILES * 16]


def _tower(core: Any, pixels: torch.Tensor) -> torch.Tensor:
    output = core.vision_tower(pixels, output_hidden_states=True)
    levels = core.config.vision_feature_layer
    levels = [levels] if isinstance(levels, int) else levels
    features = torch.cat([output.hidden_states[level] for level in levels], dim=-1)
    return features[:, 1:] if core.config.vision_feature_select_strategy == "default" else features


def tower_flops(encoder: EncoderShape, patches: list[int]) -> tuple[float, float]:
    """(linear, attention) of encoder and projector."""
    attention = 4.0 * encoder.attention_width * sum(encoder.attended_pairs(p) for p in patches)
    whole = encoder_flops(encoder, patches) + projector_flops(encoder.projector, sum(patches))
    return whole - attention, attention


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_encoder_and_projector(tmp_path: Path, family: str) -> None:
    model, shape = build(tmp_path, family)
    encoder = shape.vision
    call, patches = encode(model, family)
    last = [f"layers.{encoder.layers - 1 - number}" for number in range(encoder.idle_layers)]
    counted = Counted(model, call, ("head", *last))
    linear, attention = tower_flops(encoder, patches)
    if family == "mistral3":
        # Its attention works on all images at once, with a mask.
        attention *= sum(patches) ** 2 / sum(p * p for p in patches)
    rows = sum(encoder.rows(p) for p in patches)
    if family.startswith("internvl") or encoder.class_tokens:
        assert rows > sum(patches)
    assert counted.linear == linear
    assert counted.attention == attention


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_backbone_and_head(tmp_path: Path, family: str) -> None:
    model, shape = build(tmp_path, family)
    text = shape.text
    # The head runs for all tokens where a model does not let one choose.
    kept = {"logits_to_keep": 5} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    counted = Counted(model, lambda: model(input_ids=torch.full((1, LENGTH), 20), **kept), ("linear_attn",))
    linear, attention, head = backbone_flops(text, [LENGTH], kept.get("logits_to_keep"))
    if text.recurrent is not None:
        linear -= text.layers_with(Mixer.RECURRENT) * (2 * text.recurrent.weights + text.recurrent.state_flops) * LENGTH
    assert counted.linear == linear + head
    square = 4 * text.attention_width * text.attention_layers * LENGTH**2
    assert counted.attention == square
    if text.window is None:
        assert attention == square / 2
    else:
        assert attention < square / 2


def test_recurrent_layers_have_the_products_of_their_projections(tmp_path: Path) -> None:
    """The counter sees the convolution's padding and the blocks that carry the state: ours are the products."""
    model, shape = build(tmp_path, "qwen3_5")
    assert shape.text.recurrent is not None
    layer = model.model.language_model.layers[0].linear_attn
    counted = Counted(layer, lambda: layer(torch.zeros(1, LENGTH, shape.text.hidden)))
    convolution = layer.conv1d.weight.numel()
    products = counted.by_operator["mm"] if "mm" in counted.by_operator else counted.by_operator["addmm"]
    assert products == 2 * (shape.text.recurrent.weights - convolution) * LENGTH


def test_audio(tmp_path: Path) -> None:
    model, shape = build(tmp_path, "qwen2_5_omni_thinker")
    audio = shape.encoders[1]
    mels = torch.tensor([32])
    features = torch.zeros(16, 32)
    counted = Counted(model, lambda: model.model.audio_tower(features, feature_lens=mels, aftercnn_lens=mels // 2))
    linear, attention = tower_flops(audio, [16])
    assert counted.linear == linear
    assert counted.attention == attention


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_windows_are_the_pairs_of_the_mask(tmp_path: Path, family: str) -> None:
    """Half the diagonal aside, as with l²/2 for l (l + 1) / 2."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    text = read_shape(tmp_path).text
    for length in (1, 5, 8, 9, 40):
        pairs = 0.0
        for number, window in text.attention_windows():
            seen = torch.ones(length, length).tril().triu(1 - (window or length))
            pairs += number * (seen.sum().item() - min(length, window or length) / 2)
        assert text.attended_pairs(length) == pytest.approx(pairs)
