"""The learning-rate curve and the clip factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.schema import TrainConfig
from flowtrain.types import Module
from flowtrain.update.clip import clip_factor
from flowtrain.update.schedule import horizon_note, learning_rates, num_warmup_steps, rate_factor

SHAPES = ("cosine", "linear", "constant")


def transformers_curve(schedule: str, warmup: int, total: int, min_ratio: float) -> list[float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    options: dict[str, Any] = {}
    if schedule == "cosine" and min_ratio:
        name, options = "cosine_with_min_lr", {"min_lr_rate": min_ratio}
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=options
    )
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "min_ratio"), [("cosine", 0.0), ("cosine", 0.1), ("linear", 0.0), ("constant", 0.0)]
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_equals_transformers_after_the_warmup(schedule: Any, min_ratio: float, warmup: int) -> None:
    total = 23
    train = TrainConfig(lr=1.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=min_ratio)
    ours = [rate_factor(train, step, total) for step in range(1, total + 1)]
    theirs = transformers_curve(schedule, warmup, total, min_ratio)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-12)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], abs=1e-12)


@given(
    schedule=st.sampled_from(SHAPES),
    total=st.integers(1, 200),
    warmup=st.integers(0, 220),
    ratio=st.floats(0, 1),
)
def test_curve_is_positive_bounded_and_falls_after_the_peak(
    schedule: Any, total: int, warmup: int, ratio: float
) -> None:
    train = TrainConfig(lr=1.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    curve = [rate_factor(train, step, total) for step in range(1, total + 1)]
    assert all(0 < factor <= 1 for factor in curve)
    assert curve[:warmup] == sorted(curve[:warmup])
    assert curve[warmup:] == sorted(curve[warmup:], reverse=True)
    assert all(factor >= ratio - 1e-12 or step < warmup for step, factor in enumerate(curve))


def test_steps_past_the_end_stay_at_the_end_of_the_curve() -> None:
    train = TrainConfig(schedule="cosine", warmup_steps=0, min_lr_ratio=0.25)
    assert rate_factor(train, 1000, 10) == pytest.approx(0.25)


def test_warmup_ratio_is_rounded_up() -> None:
    assert num_warmup_steps(TrainConfig(warmup_ratio=0.03), 100) == 3
    assert num_warmup_steps(TrainConfig(warmup_ratio=0.03), 101) == 4
    assert num_warmup_steps(TrainConfig(warmup_steps=0), 100) == 0
    assert num_warmup_steps(TrainConfig(), 100) == 3


def test_each_training_module_has_its_own_peak() -> None:
    train = TrainConfig(
        lr=1e-3, module_lr={"encoder": 1e-4}, schedule="constant", warmup_steps=0, freeze=("projector",)
    )
    assert learning_rates(train, 1, 10) == {Module.ENCODER: 1e-4, Module.BACKBONE: 1e-3}


@given(norm=st.floats(0, 1e6), bound=st.floats(1e-3, 1e3))
def test_clip_factor_is_torchs(norm: float, bound: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], bound)
    ours = norm * clip_factor(norm, bound)
    assert ours == pytest.approx(parameter.grad.item(), rel=1e-12, abs=1e-300)
    assert clip_factor(norm, bound) <= 1.0
    assert clip_factor(norm, None) == 1.0


def test_a_changed_horizon_is_told_with_both_numbers_and_both_rates() -> None:
    train = TrainConfig(lr=1e-3, schedule="linear", warmup_steps=0)
    assert horizon_note(train, 50, 100, 100) is None
    assert horizon_note(TrainConfig(schedule="constant", warmup_steps=0), 50, 100, 200) is None
    note = horizon_note(train, 50, 100, 200)
    assert note is not None
    assert "had 100 steps" in note
    assert "has 200 now" in note
    assert note.endswith("of step 51 is 0.00075 where it would have been 0.0005")
