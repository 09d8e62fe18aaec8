"""The families of vision-language models: what each puts where in its config.json, and which parts it is made of.

A section whose kind is fixed has the defaults of that kind whatever its own `model_type` says; elsewhere the section
says which kind it is, and `when_absent` stands for a section that is left out altogether. Both are transformers' rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flowtrain.shapes.projectors import (
    Projector,
    gated_shuffle,
    merged,
    one_linear,
    patch_merger,
    pooled,
    scaled_linear,
    shuffled,
    strided,
    two_linear,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the file: its kind, whether the section itself may name another, and its values when left out."""

    kind: str
    fixed: bool = True
    when_absent: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        tied: the head is the embedding where the top level does not say.
        tied_by_text: the text section can say so too.
        flat: older files have the text section's keys at the top level.
        inside: section that holds the whole model.
        feature_layer: output of the tower that the projector reads where the file does not say.
        audio: it has an audio encoder as well.
        image_token_id: the id of the placeholder where the file does not say.
    """

    text: Part
    vision: Part
    projector: Projector
    tied: bool = False
    tied_by_text: bool = False
    flat: bool = False
    inside: str = ""
    feature_layer: int = -1
    audio: bool = False
    image_token_id: int | None = None
    text_sections: tuple[str, ...] = ("text_config",)


def _absent(
    hidden: int, layers: int, heads: int, mlp_width: int, patch: int, image: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp_width,
        "patch_size": patch,
        "image_size": image,
        **others,
    }


_CLIP = Part("clip_vision_model", fixed=False, when_absent=_absent(1024, 24, 16, 4096, 14, 336))
_LLAMA = Part("llama", fixed=False)
_QWEN_TOKEN = 151655

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": Family(
            Part("qwen2_vl_text"),
            Part("qwen2_vl_vision"),
            merged(2, "hidden_size"),
            tied_by_text=True,
            flat=True,
            image_token_id=_QWEN_TOKEN,
        ),
        "qwen2_5_vl": Family(
            Part("qwen2_5_vl_text"),
            Part("qwen2_5_vl_vision"),
            merged(1),
            tied_by_text=True,
            flat=True,
            image_token_id=_QWEN_TOKEN,
        ),
        "qwen3_vl": Family(Part("qwen3_vl_text"), Part("qwen3_vl_vision"), merged(2), image_token_id=_QWEN_TOKEN),
        "qwen3_vl_moe": Family(
            Part("qwen3_vl_moe_text"), Part("qwen3_vl_vision"), merged(2), image_token_id=_QWEN_TOKEN
        ),
        "qwen3_5": Family(Part("qwen3_5_text"), Part("qwen3_5_vision"), merged(2), image_token_id=248056),
        "qwen3_5_moe": Family(Part("qwen3_5_moe_text"), Part("qwen3_5_vision"), merged(2), image_token_id=248056),
        "qwen2_5_omni_thinker": Family(
            Part("qwen2_5_omni_text"), Part("qwen2_5_vl_vision"), merged(1), audio=True, image_token_id=_QWEN_TOKEN
        ),
        "qwen2_5_omni": Family(
            Part("qwen2_5_omni_text"),
            Part("qwen2_5_vl_vision"),
            merged(1),
            audio=True,
            inside="thinker_config",
            image_token_id=_QWEN_TOKEN,
        ),
        "internvl": Family(
            Part("qwen2", fixed=False), Part("internvl_vision"), shuffled, tied=True, image_token_id=151667
        ),
        "internvl_chat": Family(
            Part("qwen2", fixed=False),
            Part("intern_vit_6b", fixed=False),
            shuffled,
            tied_by_text=True,
            text_sections=("llm_config", "text_config"),
        ),
        "llava": Family(_LLAMA, _CLIP, two_linear(), tied_by_text=True, feature_layer=-2, image_token_id=32000),
        "llava_next": Family(_LLAMA, _CLIP, two_linear(separators=1), feature_layer=-2, image_token_id=32000),
        "llava_onevision": Family(
            Part("qwen2", fixed=False),
            Part(
                "siglip_vision_model",
                fixed=False,
                when_absent=_absent(1152, 26, 16, 4304, 14, 384, vision_use_head=False),
            ),
            two_linear(separators=1),
            tied_by_text=True,
            image_token_id=151646,
        ),
        "gemma3": Family(
            Part("gemma3_text"), Part("siglip_vision_model", fixed=False), pooled, tied=True, image_token_id=262144
        ),
        "paligemma": Family(
            Part(
                "gemma",
                fixed=False,
                when_absent=MappingProxyType(
                    {
                        "hidden_size": 2048,
                        "num_hidden_layers": 18,
                        "intermediate_size": 16384,
                        "num_attention_heads": 8,
                        "num_key_value_heads": 1,
                        "vocab_size": 257152,
                    }
                ),
            ),
            Part(
                "siglip_vision_model",
                fixed=False,
                when_absent=_absent(1152, 27, 16, 4096, 14, 224, vision_use_head=False),
            ),
            one_linear,
            tied=True,
            image_token_id=256000,
        ),
        "idefics3": Family(_LLAMA, Part("idefics3_vision"), scaled_linear, image_token_id=128257),
        "smolvlm": Family(_LLAMA, Part("idefics3_vision"), scaled_linear, image_token_id=128257),
        "mistral3": Family(
            Part(
                "mistral",
                fixed=False,
                when_absent=MappingProxyType(
                    {
                        "head_dim": 128,
                        "hidden_size": 5120,
                        "intermediate_size": 32768,
                        "num_attention_heads": 32,
                        "num_hidden_layers": 40,
                        "num_key_value_heads": 8,
                        "sliding_window": None,
                        "vocab_size": 131072,
                    }
                ),
            ),
            Part("pixtral", fixed=False, when_absent=_absent(1024, 24, 16, 4096, 14, 1540, head_dim=64)),
            patch_merger,
            tied=True,
            image_token_id=10,
        ),
        "glm4v": Family(Part("glm4v_text"), Part("glm4v_vision"), strided, tied_by_text=True, image_token_id=151343),
        "glm46v": Family(
            Part("glm4v_text", fixed=False),
            Part("glm4v_vision", fixed=False),
            strided,
            tied_by_text=True,
            image_token_id=151343,
        ),
        "glm4v_moe": Family(
            Part("glm4v_moe_text"), Part("glm4v_vision"), strided, tied_by_text=True, image_token_id=151363
        ),
        "aya_vision": Family(
            Part("cohere2", fixed=False),
            Part(
                "siglip_vision_model",
                fixed=False,
                when_absent=_absent(1152, 26, 14, 4304, 14, 384, vision_use_head=False),
            ),
            gated_shuffle(norm=True),
            tied=True,
            image_token_id=255036,
        ),
        "cohere2_vision": Family(
            Part("cohere2", fixed=False),
            Part("siglip_vision_model", fixed=False, when_absent=_absent(1152, 27, 12, 3072, 16, 512)),
            gated_shuffle(norm=False, width_between=36864),
            tied=True,
            image_token_id=255036,
        ),
    }
)
