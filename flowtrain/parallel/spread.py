"""Spreads a half over the ranks of its side, as its layout says, and reads what this rank holds of the weights.

half on meta ─ tp: parts of the parameters (`tensor.py`) ─ dp_shard: pieces of these (`shard.py`) ─▶ boxes of the whole
safetensors ─────────────────────────────────────────────────────────────── read box by box ─▶ memory of this rank
"""

from __future__ import annotations

import torch

from flowtrain.models.half import Half
from flowtrain.models.weights import StoredTensor
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.pieces import like_parameter, local_tensor
from flowtrain.parallel.roles import plan_tensor
from flowtrain.parallel.shard import filled, shard
from flowtrain.parallel.tensor import apply_tensor, describe


class SideSpread:
    """Implements `flowtrain.models.half.Spread`; `holding` says what lies here once the half is cut."""

    def __init__(self, groups: Groups, timeout_seconds: float) -> None:
        self.holding = Holding(groups)
        self.timeout_seconds = timeout_seconds

    def cut(self, half: Half) -> None:
        groups = self.holding.groups
        layout = groups.layout
        if layout.tp > 1:
            plan = plan_tensor(describe(half), layout.tp, f"layout t{layout.tp}")
            apply_tensor(half, plan, groups.over(("tp",)), self.timeout_seconds)
            self.holding = Holding(groups, plan)
        if layout.dp_shard > 1:
            assert groups.mesh is not None
            shard(half, groups.mesh["dp_shard"])

    def read(
        self, name: str, empty: torch.Tensor, stored: StoredTensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        piece = torch.empty(local_tensor(empty).shape, dtype=dtype, device=device)
        for box in self.holding.boxes(name, empty):
            piece[box.own.slices].copy_(stored[box.whole.slices])
        return like_parameter(piece, empty)

    def filled(self, half: Half) -> None:
        filled(half)
