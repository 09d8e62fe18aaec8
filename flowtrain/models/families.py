"""The model families that can be cut, and the little that sets one apart; all else is read off the model (contract C4).

| question | answered by |
|---|---|
| which parameter belongs to which part | `table.py`, by name |
| what the encoder is called with | signature of `get_image_features` and what the processor returns (`features.py`) |
| where the projector lies: in the encoder, or behind it | the table (`playback.py`) |
| three-axis positions or plain ones | whether the model has `get_rope_index` (`positions_of`) |
| levels of features, their widths | `flowtrain.shapes` |
| image blocks that attend both ways | here: nothing in a model says so |

A family is listed once it is proven: its halves equal the uncut model in float64, for every freeze setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flowtrain.shapes import check_family


@dataclass(frozen=True, slots=True)
class Family:
    """`image_blocks`: neighbouring image tokens of a sample all see each other, text stays causal (Gemma 3)."""

    image_blocks: bool = False


FAMILIES: dict[str, Family] = {
    "gemma3": Family(image_blocks=True),
    "glm4v": Family(),
    "glm4v_moe": Family(),
    "idefics3": Family(),
    "internvl": Family(),
    "llava": Family(),
    "llava_next": Family(),
    "llava_onevision": Family(),
    "qwen2_5_vl": Family(),
    "qwen2_vl": Family(),
    "qwen3_5": Family(),
    "qwen3_5_moe": Family(),
    "qwen3_vl": Family(),
    "qwen3_vl_moe": Family(),
    "smolvlm": Family(),
}
"""`model_type` of config.json → what is particular to it."""


def family_of(model_type: str) -> Family:
    """Raises: ConfigError naming the family and those that are supported."""
    check_family(model_type)
    return FAMILIES[model_type]


def ordinary_ids(model_config: Any) -> list[int]:
    """Token ids to which config.json gives no meaning of their own, ascending."""
    special = {v for key, v in model_config.to_dict().items() if key.endswith("token_id") and isinstance(v, int)}
    return [token for token in range(model_config.get_text_config().vocab_size) if token not in special]


def has_image_axes(model: Any) -> bool:
    """Whether rotary positions have three axes: frames, rows and columns of an image."""
    return hasattr(model.model, "get_rope_index")


def positions_of(model: Any, input_ids: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor:
    """Positions of one sample, from 0: (3, 1, T) or (1, T). On the CPU: the model's own function walks over images."""
    if not has_image_axes(model):
        return torch.arange(len(input_ids))[None]
    if grids is None or len(grids) == 0:
        return torch.arange(len(input_ids)).expand(3, 1, -1)
    types = (input_ids == model.config.image_token_id).int()
    position_ids, _ = model.model.get_rope_index(input_ids[None], types[None], image_grid_thw=grids)
    return torch.as_tensor(position_ids)


def block_numbers(is_image: torch.Tensor) -> torch.Tensor | None:
    """(T,) number of the run of image tokens that a token belongs to, -1 for text; None where there is no image.

    >>> block_numbers(torch.tensor([False, True, True, False, True]))
    tensor([-1,  0,  0, -1,  1])
    """
    if not bool(is_image.any()):
        return None
    starts = is_image & ~torch.cat([is_image.new_zeros(1), is_image[:-1]])
    return torch.where(is_image, starts.long().cumsum(0) - 1, -1)
