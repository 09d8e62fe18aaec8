"""The learning-rate curve as a pure function of the step (K12): resumed at N, it goes on as if never stopped.

    factor
      1 ┤      ╭──╮            constant ────
        │    ╱     ╲  cosine, linear
        │  ╱          ╲
    min ┤╱              ──
        └─1────W──────────T─▶ step

| steps | factor |
|---|---|
| 1 … W (warm-up) | step / W: above 0 at the first step, the peak at step W |
| W + 1 … T | the shape at progress (step - 1 - W) / (T - W), from the peak towards `min_lr_ratio` |

After the warm-up this is the curve of transformers' `get_scheduler`; within it transformers is one step behind (its
first step trains at rate 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowtrain.config.schema import TrainConfig
from flowtrain.types import Module

DEFAULT_WARMUP_RATIO = 0.03


def num_warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Steps from 0 to the peak: `warmup_steps`, or a share of all steps rounded up."""
    if train.warmup_steps is not None:
        return train.warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if train.warmup_ratio is None else train.warmup_ratio
    return math.ceil(ratio * total_steps)


def rate_factor(train: TrainConfig, step: int, total_steps: int) -> float:
    """Share of the peak at `step` (from 1); steps past `total_steps` stay at the end of the curve."""
    assert step >= 1, f"updates are counted from 1, not {step}"
    warmup = num_warmup_steps(train, total_steps)
    if step <= warmup:
        return step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    match train.schedule:
        case "constant":
            return 1.0
        case "linear":
            shape = 1.0 - progress
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.min_lr_ratio + (1.0 - train.min_lr_ratio) * shape


def learning_rates(train: TrainConfig, step: int, total_steps: int) -> dict[Module, float]:
    """Learning rate of every module that trains, for update `step` (from 1) of `total_steps`."""
    factor = rate_factor(train, step, total_steps)
    return {
        module: train.module_lr.get(module.value, train.lr) * factor
        for module in Module
        if module.value not in train.freeze
    }


def resume_notes(train: TrainConfig, state: Mapping[str, Any], total_steps: int) -> list[str]:
    """What is worth saying where a run goes on from a checkpoint with this state of the controller."""
    horizon = horizon_note(train, state["step"], state["total_steps"], total_steps)
    notes = [horizon] if horizon is not None else []
    if state["freeze"] != (now := sorted(train.freeze)):
        notes.append(
            f"note: train.freeze was [{', '.join(state['freeze'])}] when the checkpoint was saved and is "
            f"[{', '.join(now)}] now: what trains anew begins without moments"
        )
    return notes


def horizon_note(train: TrainConfig, step: int, old_total: int, new_total: int) -> str | None:
    """One sentence for a run that goes on after `step` with another number of steps than it began with (K12).

    None when the number, or the rate at the joint, is the same.
    """
    if old_total == new_total:
        return None
    before, after = (train.lr * rate_factor(train, step + 1, total) for total in (old_total, new_total))
    if before == after:
        return None
    return (
        f"the run had {old_total} steps when its checkpoint was saved and has {new_total} now: the learning rate of "
        f"step {step + 1} is {after:.3g} where it would have been {before:.3g}"
    )
