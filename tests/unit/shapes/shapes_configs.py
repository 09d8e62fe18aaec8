"""A tiny model of every family as its config.json would have it; some leave out what has a default."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 120,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MROPE = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 2, 2]}}
"""Six frequencies of a head of twelve, shared by time, height and width."""

IDS: dict[str, Any] = {
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}
GLM_IDS: dict[str, Any] = {
    "image_token_id": 100,
    "video_token_id": 101,
    "image_start_token_id": 102,
    "image_end_token_id": 103,
    "video_start_token_id": 104,
    "video_end_token_id": 105,
}

MERGING: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 56,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 56,
    "image_size": 16,
    "patch_size": 4,
}
SIGLIP: dict[str, Any] = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
DELTA: dict[str, Any] = {
    "head_dim": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}


def _text(model_type: str, **others: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **others}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        **IDS,
        "text_config": _text("qwen2_vl_text", **MROPE),
        "vision_config": {
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 48,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **IDS,
        "text_config": _text("qwen2_5_vl_text", tie_word_embeddings=True, **MROPE),
        "vision_config": {**MERGING, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **IDS,
        "tie_word_embeddings": True,
        "text_config": _text("qwen3_vl_text", head_dim=16, attention_bias=True),
        "vision_config": {**MERGING, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        **IDS,
        "text_config": _text("qwen3_vl_moe_text", head_dim=16, **EXPERTS),
        "vision_config": {**MERGING, "num_position_embeddings": 36, "deepstack_visual_indexes": [1]},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        **IDS,
        "text_config": _text("qwen3_5_text", **DELTA),
        "vision_config": {**MERGING, "num_position_embeddings": 36},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        **IDS,
        "text_config": _text(
            "qwen3_5_moe_text",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            **DELTA,
        ),
        "vision_config": {**MERGING, "num_position_embeddings": 36},
    },
    "qwen2_5_omni_thinker": {
        "model_type": "qwen2_5_omni_thinker",
        "image_token_index": 100,
        "video_token_index": 101,
        "audio_token_index": 102,
        "text_config": _text("qwen2_5_omni_text", tie_word_embeddings=False, **MROPE),
        "vision_config": {**MERGING, "window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "d_model": 24,
            "n_window": 8,
            "max_source_positions": 64,
            "output_dim": 48,
        },
    },
    "internvl": {
        "model_type": "internvl",
        "image_token_id": 100,
        "tie_word_embeddings": False,
        "text_config": _text("qwen2"),
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 56,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "attention_bias": True,
        },
    },
    "llava": {
        "model_type": "llava",
        "image_token_index": 100,
        "text_config": _text("llama"),
        "vision_config": CLIP,
    },
    "llava_next": {
        "model_type": "llava_next",
        "image_token_index": 100,
        "text_config": _text("mistral", sliding_window=None),
        "vision_config": CLIP,
        "vision_feature_layer": [-2, -3],
        "image_grid_pinpoints": [[16, 32], [32, 16]],
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "image_token_index": 100,
        "video_token_index": 101,
        "text_config": _text("qwen2", tie_word_embeddings=True),
        "vision_config": SIGLIP,
        "image_grid_pinpoints": [[16, 16], [16, 32]],
    },
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": 100,
        "boi_token_index": 101,
        "eoi_token_index": 102,
        "mm_tokens_per_image": 4,
        "text_config": _text("gemma3_text", head_dim=16, sliding_window=8, sliding_window_pattern=2),
        "vision_config": {**SIGLIP, "vision_use_head": True},
    },
    "paligemma": {
        "model_type": "paligemma",
        "image_token_index": 100,
        "projection_dim": 48,
        "text_config": _text("gemma", head_dim=16),
        "vision_config": SIGLIP,
    },
    "idefics3": {
        "model_type": "idefics3",
        "image_token_id": 100,
        "text_config": _text("llama"),
        "vision_config": {**CLIP, "model_type": "idefics3_vision"},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "image_token_id": 100,
        "scale_factor": 4,
        "tie_word_embeddings": True,
        "text_config": _text("llama", head_dim=16),
        "vision_config": {**CLIP, "model_type": "smolvlm_vision"},
    },
    "mistral3": {
        "model_type": "mistral3",
        "image_token_index": 100,
        "tie_word_embeddings": False,
        "text_config": _text("mistral", head_dim=16, sliding_window=None),
        "vision_config": {**CLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
    },
    "glm4v": {
        "model_type": "glm4v",
        **GLM_IDS,
        "text_config": _text(
            "glm4v_text", rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [2, 2, 2]}
        ),
        "vision_config": {**MERGING, "image_size": 24, "attention_bias": True},
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        **GLM_IDS,
        "text_config": _text(
            "glm4v_moe_text",
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_shared_experts=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 1]},
        ),
        "vision_config": {**MERGING, "image_size": 24},
    },
    "aya_vision": {
        "model_type": "aya_vision",
        "image_token_index": 100,
        "text_config": _text("cohere2", sliding_window=8),
        "vision_config": SIGLIP,
    },
    "cohere2_vision": {
        "model_type": "cohere2_vision",
        "image_token_id": 100,
        "alignment_intermediate_size": 64,
        "text_config": _text("cohere2", sliding_window=8),
        "vision_config": SIGLIP,
    },
}
CONFIGS["glm46v"] = {**CONFIGS["glm4v_moe"], "model_type": "glm46v"}
