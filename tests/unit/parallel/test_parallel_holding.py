"""What is written of a half by all its ranks together is each tensor once, whoever else holds it."""

from __future__ import annotations

import pytest
import torch

from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.plan import layout_of

STAGES = {"embed": (0, 1), "first": (0,), "last": (1,)}
"""Of a pipeline of two whose head is tied to the embedding: both ends hold that."""


@pytest.mark.parametrize("layout", ["p2", "r2p2", "c2p2"])
def test_an_export_has_each_tensor_once(layout: str) -> None:
    degrees = layout_of(layout)
    of_ranks = []
    for rank in range(degrees.world_size):
        holding = Holding(Groups(degrees, rank), stages=STAGES)
        held = {name: torch.full((2,), float(rank)) for name, stages in STAGES.items() if holding.stage in stages}
        of_ranks.append(holding.gathered(held))
    written = [(name, rank) for rank, tensors in enumerate(of_ranks) for name in tensors]
    second = degrees.world_size // 2
    assert sorted(written) == [("embed", 0), ("first", 0), ("last", second)]
    assert all(torch.equal(of_ranks[rank][name], torch.full((2,), float(rank))) for name, rank in written)
