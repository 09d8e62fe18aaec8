"""Processors of the tiny model folders: each family's own classes, with images of a few patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers


def grid_processor(name: str, videos: str, image_processor: str = "Qwen2VLImageProcessor") -> Callable[[Any], Any]:
    """Families that take patches of any grid; at most 64 patches an image."""

    def make(tokenizer: Any) -> Any:
        sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
        pixels = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
        images = getattr(transformers, image_processor)(**sizes, **pixels)
        of_videos = getattr(transformers, videos)(**sizes)
        return getattr(transformers, name)(images, tokenizer, of_videos)

    return make


def internvl_processor(tokenizer: Any) -> Any:
    images = transformers.GotOcr2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    videos = transformers.InternVLVideoProcessor(size={"height": 32, "width": 32})
    return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4)


def idefics_processor(name: str) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        if name == "Idefics3":
            images = transformers.Idefics3ImageProcessor(**sizes)
            return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
        images = transformers.SmolVLMImageProcessor(**sizes)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)

    return make


def llava_processor(tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_center_crop=True
    )
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


PINPOINTS = [[32, 64], [64, 32], [64, 64]]


def llava_next_processor(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS
    )
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def llava_onevision_processor(tokenizer: Any) -> Any:
    images = transformers.LlavaOnevisionImageProcessor(size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS)
    videos = transformers.LlavaOnevisionVideoProcessor(size={"height": 32, "width": 32})
    return transformers.LlavaOnevisionProcessor(
        images, tokenizer, videos, num_image_tokens=16, vision_feature_select_strategy="full"
    )


def gemma3_processor(tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
