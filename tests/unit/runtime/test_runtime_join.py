"""What a process needs before it joins the others of its side."""

from __future__ import annotations

import pytest
import torch

from flowtrain.errors import PlanError
from flowtrain.plan import RankPlan
from flowtrain.runtime.join import check_device
from flowtrain.types import Role


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_cannot_use_is_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"producer 0 is to run on cuda:0 and torch .* producers.device: cpu"):
        check_device(RankPlan(Role.PRODUCER, 0, "cuda:0", 1))


def test_a_cpu_needs_nothing() -> None:
    check_device(RankPlan(Role.CONSUMER, 0, "cpu", 1))
