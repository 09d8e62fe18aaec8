"""What differs between model families at the cut; everything else is one generic path (contract C4).

| step | side | Qwen3-VL |
|---|---|---|
| `prepare_encoder` | producer | cut before the projector: a tap in place of every merger keeps what it was given |
| `encode` | producer | `get_image_features` over all images of the unit, split by sample |
| `encoder_outputs` | consumer | what `forward` takes as `mm_encoder_outputs`; cut before: mergers run on the features |
| `positions` | consumer | the model's own 3-axis rotary positions of one sample |
| `example_image` | consumer | a small image's grid and features, for the load-time leak test |

Shapes: T tokens of a sample, P patches of a sample, D feature width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from flowtrain.shapes import check_family
from flowtrain.types import Cut

Inputs = Mapping[str, torch.Tensor]
Features = tuple[torch.Tensor, ...]


class Family(Protocol):
    """One model family's way across the cut. Stateless: all state is in the model that it is given."""

    def prepare_encoder(self, model: Any, cut: Cut) -> None: ...

    def encode(self, model: Any, inputs: Sequence[Inputs], cut: Cut) -> list[Features]: ...

    def encoder_outputs(self, model: Any, features: Features, cut: Cut) -> Any: ...

    def positions(self, model: Any, input_ids: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor: ...

    def example_image(self, model: Any, side: int, cut: Cut) -> tuple[torch.Tensor, list[tuple[int, int]]]: ...


class _Tap(nn.Module):
    """Stands where a merger was: keeps the merger's input and passes on something of the merger's number of rows."""

    def __init__(self, patches_per_token: int) -> None:
        super().__init__()
        self.patches_per_token = patches_per_token
        self.kept: torch.Tensor | None = None

    def forward(self, hidden_PD: torch.Tensor) -> torch.Tensor:
        self.kept = hidden_PD
        return hidden_PD.view(-1, hidden_PD.shape[-1] * self.patches_per_token)

    def take(self) -> torch.Tensor:
        kept, self.kept = self.kept, None
        assert kept is not None, "the encoder did not call its projector"
        return kept


class Qwen3VL:
    """One merger after the last layer, and one for each deep-stack level: (pooler, level 0, level 1, …)."""

    def prepare_encoder(self, model: Any, cut: Cut) -> None:
        if cut is Cut.BEFORE_PROJECTOR:
            visual = model.model.visual
            visual.merger = _Tap(visual.spatial_merge_unit)
            visual.deepstack_merger_list = nn.ModuleList(
                [_Tap(visual.spatial_merge_unit) for _ in visual.deepstack_merger_list]
            )

    def encode(self, model: Any, inputs: Sequence[Inputs], cut: Cut) -> list[Features]:
        """One encoder call over all images of all samples."""
        visual = model.model.visual
        grids = torch.cat([sample["image_grid_thw"] for sample in inputs])
        pixels = torch.cat([sample["pixel_values"] for sample in inputs])
        output = model.get_image_features(pixels, grids)
        patches = [int(sample["image_grid_thw"].prod(-1).sum()) for sample in inputs]
        if cut is Cut.BEFORE_PROJECTOR:
            whole = [visual.merger.take(), *(tap.take() for tap in visual.deepstack_merger_list)]
            rows = patches
        else:
            whole = [torch.cat(images) for images in (output.pooler_output, *output.deepstack_features)]
            rows = [count // visual.spatial_merge_unit for count in patches]
        return list(zip(*(tensor.split(rows) for tensor in whole), strict=True))

    def encoder_outputs(self, model: Any, features: Features, cut: Cut) -> Any:
        if cut is Cut.BEFORE_PROJECTOR:
            visual = model.model.visual
            mergers = [visual.merger, *visual.deepstack_merger_list]
            features = tuple(merger(hidden_PD) for merger, hidden_PD in zip(mergers, features, strict=True))
        pooler_TD, *levels = features
        return {
            "image": BaseModelOutputWithDeepstackFeatures(
                pooler_output=[pooler_TD], deepstack_features=[[level_TD] for level_TD in levels]
            )
        }

    def positions(self, model: Any, input_ids: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor:
        """(3, T) positions of one sample, from 0. On the CPU: the model's own function walks over images in Python."""
        if grids is None or len(grids) == 0:
            return torch.arange(len(input_ids)).expand(3, -1)
        types = (input_ids == model.config.image_token_id).int()
        position_ids, _ = model.model.get_rope_index(input_ids[None], types[None], image_grid_thw=grids)
        return position_ids[:, 0]

    def example_image(self, model: Any, side: int, cut: Cut) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Grid of a square image of `side`² tokens, and the (rows, width) of each of its features."""
        vision = model.config.vision_config
        merge = vision.spatial_merge_size
        levels = 1 + len(vision.deepstack_visual_indexes)
        grid = torch.tensor([1, side * merge, side * merge])
        if cut is Cut.BEFORE_PROJECTOR:
            return grid, [(int(grid.prod()), vision.hidden_size)] * levels
        return grid, [(side * side, vision.out_hidden_size)] * levels


FAMILIES: dict[str, Family] = {"qwen3_vl": Qwen3VL()}
"""`model_type` of config.json → how that family crosses the cut."""


def family_of(model_type: str) -> Family:
    """Raises: ConfigError naming the family and those that are supported."""
    check_family(model_type)
    return FAMILIES[model_type]
