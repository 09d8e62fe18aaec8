"""Tiny random model folders of many families, made offline: config, byte-level tokenizer and processor.

    make_family("gemma3", FOLDER)  ──▶  FOLDER/config.json, tokenizer.json, processor files, chat_template.jinja

No weights: `model.init: random` makes them from the run's seed. Every folder is small enough for a run in float64 to
take a second a step, and keeps what sets its family apart: windows, tiles, a class token, a row of markers around an
image, image blocks that attend both ways, experts, another token mixer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tiny_processors import (
    PINPOINTS,
    gemma3_processor,
    grid_processor,
    idefics_processor,
    internvl_processor,
    llava_next_processor,
    llava_onevision_processor,
    llava_processor,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = Path(__file__).parents[1] / "examples" / "emoji" / "data" / "train.jsonl"
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
VISION_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
GRID_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
}
GRID_VISION = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TILE_VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one family's folder is made.

    Attributes:
        config: class of the config, and its values; names of special tokens under `token_ids` become their ids.
        image: what the chat template writes for an image.
        specials: special tokens besides those of the chat.
        attributes: names that the processor asks the tokenizer for, and their tokens.
        processor: tokenizer → processor.
    """

    config: str
    values: dict[str, Any]
    token_ids: dict[str, str]
    image: str
    specials: tuple[str, ...]
    processor: Callable[[Any], Any]
    attributes: dict[str, str] | None = None


def make_family(family: str, folder: Path, changed: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Write the folder of one family; returns it. `changed`: other values of its text_config or vision_config."""
    recipe = RECIPES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(recipe)
    values = json.loads(json.dumps(recipe.values))
    values.update({key: tokenizer.convert_tokens_to_ids(token) for key, token in recipe.token_ids.items()})
    for part, others in (changed or {}).items():
        values[part] |= others
    values["text_config"] |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = recipe.processor(tokenizer)
        assert len(tokenizer) == values["text_config"]["vocab_size"], "the processor added tokens of its own"
        processor.chat_template = tokenizer.chat_template
        getattr(transformers, recipe.config)(**values).save_pretrained(folder)
        processor.save_pretrained(folder)
    return folder


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level, with a few merges, so that borders between text and image markers are tried too."""
    tokens = [*CHAT, *recipe.specials]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with TEXTS.open(encoding="utf-8") as lines:
        texts = [message["content"] for line in islice(lines, 200) for message in json.loads(line)["messages"]]
    trainer = trainers.BpeTrainer(
        vocab_size=320 + len(tokens),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "\n\n\n\n:\n\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_template(recipe.image),
        extra_special_tokens=recipe.attributes or {},
    )


def _template(image: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}" + image + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# --- recipes ----------------------------------------------------------------------------------------------------------

GRID_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
ROW_TAGS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
IDEFICS_SPECIALS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *ROW_TAGS)


def _grid_family(config: str, text: dict[str, Any], vision: dict[str, Any], processor: str) -> Recipe:
    return Recipe(
        config,
        {"text_config": TEXT | text, "vision_config": GRID_VISION | vision, "tie_word_embeddings": False},
        GRID_TOKENS,
        VISION_TEXT,
        GRID_SPECIALS,
        grid_processor(processor, "Qwen3VLVideoProcessor" if "3" in config else "Qwen2VLVideoProcessor"),
    )


def _glm_family(config: str, text: dict[str, Any]) -> Recipe:
    rope = {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
    return Recipe(
        config,
        {
            "text_config": TEXT | rope | text,
            "vision_config": GRID_VISION | {"image_size": 32, "intermediate_size": 48},
        },
        GLM_TOKENS,
        "<|begin_of_image|><|image|><|end_of_image|>",
        tuple(GLM_TOKENS.values()),
        grid_processor("Glm4vProcessor", "Glm4vVideoProcessor", "Glm4vImageProcessor"),
    )


def _tile_family(
    config: str, vision_type: str, processor: Callable[[Any], Any], text_type: str = "llama", **values: Any
) -> Recipe:
    vision = values.pop("vision", {})
    token_ids = values.pop("token_ids", {"image_token_index": "<image>"})
    image = values.pop("image", "<image>")
    specials = values.pop("specials", ("<image>",))
    attributes = values.pop("attributes", None)
    text = values.pop("text", {})
    return Recipe(
        config,
        {
            "text_config": {"model_type": text_type} | TEXT | text,
            "vision_config": {"model_type": vision_type} | TILE_VISION | vision,
            **values,
        },
        token_ids,
        image,
        specials,
        processor,
        attributes,
    )


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MROPE3 = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
RECIPES: dict[str, Recipe] = {
    "qwen3_vl": _grid_family(
        "Qwen3VLConfig", MROPE3, {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}, "Qwen3VLProcessor"
    ),
    "qwen2_vl": _grid_family(
        "Qwen2VLConfig",
        {"rope_parameters": MROPE},
        {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
        "Qwen2VLProcessor",
    ),
    "qwen2_5_vl": _grid_family(
        "Qwen2_5_VLConfig",
        {"rope_parameters": MROPE},
        {"window_size": 32, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl_moe": _grid_family(
        "Qwen3VLMoeConfig",
        MROPE3 | EXPERTS,
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "Qwen3VLProcessor",
    ),
    "qwen3_5": _grid_family("Qwen3_5Config", LINEAR, {"num_position_embeddings": 64}, "Qwen3VLProcessor"),
    "qwen3_5_moe": _grid_family(
        "Qwen3_5MoeConfig",
        LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
        {"num_position_embeddings": 64},
        "Qwen3VLProcessor",
    ),
    "glm4v": _glm_family("Glm4vConfig", {}),
    "glm4v_moe": _glm_family(
        "Glm4vMoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "internvl": _tile_family(
        "InternVLConfig",
        "internvl_vision",
        internvl_processor,
        "qwen2",
        vision={"image_size": [32, 32], "patch_size": [8, 8]},
        image_seq_length=4,
        token_ids={"image_token_id": "<IMG_CONTEXT>"},
        image="<IMG_CONTEXT>",
        specials=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        attributes={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "idefics3": _tile_family(
        "Idefics3Config",
        "idefics3_vision",
        idefics_processor("Idefics3"),
        token_ids={"image_token_id": "<image>"},
        specials=IDEFICS_SPECIALS,
    ),
    "smolvlm": _tile_family(
        "SmolVLMConfig",
        "smolvlm_vision",
        idefics_processor("SmolVLM"),
        token_ids={"image_token_id": "<image>"},
        specials=IDEFICS_SPECIALS,
        attributes={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
    ),
    "llava": _tile_family("LlavaConfig", "clip_vision_model", llava_processor, image_seq_length=16),
    "llava_next": _tile_family(
        "LlavaNextConfig",
        "clip_vision_model",
        llava_next_processor,
        image_seq_length=16,
        image_grid_pinpoints=PINPOINTS,
    ),
    "llava_onevision": _tile_family(
        "LlavaOnevisionConfig",
        "siglip_vision_model",
        llava_onevision_processor,
        "qwen2",
        image_grid_pinpoints=PINPOINTS,
        vision={"vision_use_head": False},
        token_ids={"image_token_index": "<image>", "video_token_index": "<video>"},
        specials=("<image>", "<video>"),
    ),
    "gemma3": _tile_family(
        "Gemma3Config",
        "siglip_vision_model",
        gemma3_processor,
        "gemma3_text",
        text={
            "query_pre_attn_scalar": 8,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
        vision={"vision_use_head": False},
        mm_tokens_per_image=4,
        token_ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        image="<start_of_image>",
        specials=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        attributes={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
}
