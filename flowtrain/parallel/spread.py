"""Spreads a half over the ranks of its side, as its layout says, and reads what this rank holds of the weights.

half on meta ─ pp: parameters of own sections (`models/sections.py`)
             ─ ep: own experts (`experts.py`)
             ─ tp: parts of these (`tensor.py`) ─ dp_shard: pieces of these (`shard.py`) ─▶ boxes of the whole
safetensors ─────────────────────────────────────────────────────────────── read box by box ─▶ memory of this rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.half import Half
from flowtrain.models.sections import sections_of_parameters
from flowtrain.models.weights import StoredTensor
from flowtrain.parallel.experts import apply_experts
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.pieces import like_parameter, local_tensor
from flowtrain.parallel.roles import plan_tensor
from flowtrain.parallel.shard import filled, shard
from flowtrain.parallel.tensor import apply_tensor, describe
from flowtrain.pipeline import Section, own_sections


class SideSpread:
    """Implements `flowtrain.models.half.Spread`; `holding` says what lies here once the half is cut.

    `sections`: of a pipeline, all of them; one without.
    """

    def __init__(self, groups: Groups, timeout_seconds: float, sections: Sequence[Section] = ()) -> None:
        self.holding = Holding(groups)
        self.timeout_seconds = timeout_seconds
        self.sections = sections

    def cut(self, half: Half) -> None:
        groups = self.holding.groups
        layout = groups.layout
        if layout.pp > 1:
            assert isinstance(half, BackboneHalf)
            half.run_sections_of(self.sections, own_sections(self.sections, self.holding.stage, layout.pp))
            needed = sections_of_parameters(half.model, self.sections)
            stages = {name: tuple(sorted({number % layout.pp for number in needed[name]})) for name in half.module_of()}
            self.holding = replace(self.holding, stages=stages)
        if layout.tp > 1:
            plan = plan_tensor(describe(half), layout.tp, f"layout t{layout.tp}")
            apply_tensor(half, plan, groups.carrying("tp"), self.timeout_seconds)
            self.holding = replace(self.holding, plan=plan)
        if layout.ep > 1:
            self.holding = replace(self.holding, experts=apply_experts(half, groups.experts))
        if layout.dp_shard > 1:
            assert groups.mesh is not None
            shard(half, groups.mesh["dp_shard"], self.holding.experts.cuts.keys())

    def read(
        self, name: str, empty: torch.Tensor, stored: StoredTensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        piece = torch.empty(local_tensor(empty).shape, dtype=dtype, device=device)
        for box in self.holding.boxes(name, empty):
            piece[box.own.slices].copy_(stored[box.whole.slices])
        return like_parameter(piece, empty)

    def filled(self, half: Half) -> None:
        filled(half)
