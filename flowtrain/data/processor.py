"""The model folder's processor, with the config's pixel limits applied and proven.

A processor may take a limit without keeping it, or expand images in a form of its own. Both would show as wrong token
counts deep in a run, so they are tried once at load: a large and a small image for the limits, one small row for the
expansion (`flowtrain.data.sample` must give exactly the ids that the processor gives).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these holds a vocabulary; without one transformers makes an empty tokenizer and says nothing."""


def load_processor(model_dir: Path, config: Config) -> Any:
    """A transformers processor; ConfigError when the folder has none that can be used as configured."""
    from transformers import AutoProcessor

    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ConfigError(f"model.path: {model_dir} is not a folder")
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path: {model_dir} has no tokenizer (tokenizer.json)")
    try:
        processor = AutoProcessor.from_pretrained(
            model_dir, trust_remote_code=config.model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(_unusable(model_dir, config, error)) from error
    for part in ("image_processor", "tokenizer"):
        if getattr(processor, part, None) is None:
            raise ConfigError(
                f"model.path: the processor of {model_dir} has no {part}; a vision-language model needs one"
            )
    if not getattr(processor, "chat_template", None):
        raise ConfigError(
            f"model.path: {model_dir} has no chat template (chat_template.jinja): rows cannot be rendered"
        )
    if not getattr(processor.tokenizer, "is_fast", False):
        raise ConfigError(
            f"model.path: {model_dir} has no tokenizer.json: only tokenizers that tell offsets are supported"
        )
    for name in ("image_token", "_process_images"):
        if getattr(processor, name, None) is None:
            raise ConfigError(
                f"model.path: {type(processor).__name__} has no `{name}`, so image tokens cannot be counted"
            )
    _limit_pixels(processor, config)
    return processor


def _unusable(model_dir: Path, config: Config, error: Exception) -> str:
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not config.model.trust_remote_code and "trust_remote_code" in str(error):
        return f"model.path: {model_dir} needs Python code of its own: read it, then set model.trust_remote_code: true"
    return f"model.path: the processor of {model_dir} cannot be loaded: {cause}"


def _limit_pixels(processor: Any, config: Config) -> None:
    """Set the processor's own size keys and check that the token counts obey."""
    most, least = config.data.max_pixels, config.data.min_pixels
    if most is None and least is None:
        return
    image_processor = processor.image_processor
    size = image_processor.size
    keys = dict(size) if isinstance(size, dict) else {k: v for k, v in vars(size).items() if v is not None}
    name = type(image_processor).__name__
    if not {"shortest_edge", "longest_edge"} <= set(keys):
        raise ConfigError(
            f"data.max_pixels, data.min_pixels: {name} has no pixel limits (its size is {keys}); remove them"
        )
    keys["longest_edge"] = most or keys["longest_edge"]
    keys["shortest_edge"] = least or (min(keys["shortest_edge"], most) if most else keys["shortest_edge"])
    if keys["shortest_edge"] > keys["longest_edge"]:
        raise ConfigError(
            f"data.min_pixels: {keys['shortest_edge']} is more than the cap of {keys['longest_edge']} pixels an image"
        )
    image_processor.size = type(size)(**keys)
    _check_limits(processor, most, least, name)


def _check_limits(processor: Any, most: int | None, least: int | None, name: str) -> None:
    side = int((most or 1) ** 0.5) * 3 + 64
    for limit, sizes, obeys in (
        (most, [(side, side), (side * 2, side)], lambda pixels, limit: pixels <= limit),
        (least, [(8, 8), (16, 8)], lambda pixels, limit: pixels >= limit),
    ):
        if limit is None:
            continue
        for height, width in sizes:
            patches = count_image(processor, height, width)[1]
            pixels = patches * int(processor.image_processor.patch_size) ** 2
            if not obeys(pixels, limit):
                raise ConfigError(
                    f"data.max_pixels, data.min_pixels: {name} makes {pixels} pixels of a {width}×{height} image "
                    f"against the limit of {limit}; choose a limit that whole patches can keep"
                )


def count_image(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(LLM tokens, encoder patches) of one image; ValueError for a shape that the processor refuses."""
    counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
    return int(counts["num_image_tokens"][0]), int(counts["num_image_patches"][0])
