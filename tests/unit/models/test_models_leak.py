"""The load-time leak test sees a leak, names the layer, and lets sound models pass (contract C5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from models_reference import load_halves
from torch import nn

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.models.leak import check_packing, decoder_layers, find_leak


class Shift(nn.Module):
    """A token mixer that knows no borders: each token takes a little from the one before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = self.inner(hidden, *args, **kwargs)
        return out + 0.1 * torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("freeze", [(), ("encoder",)], ids="+".join)
def test_a_sound_model_is_packed(
    dtype: str, freeze: tuple[str, ...], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    _, backbone = load_halves(make_config(dtype, freeze=freeze), weights_dir)
    state = torch.get_rng_state()
    start = time.process_time()
    assert check_packing(backbone) == "packed"
    assert time.process_time() - start < 5
    assert torch.equal(torch.get_rng_state(), state)
    assert backbone.training
    assert not backbone.one_by_one
    assert all(p.grad is None for p in backbone.parameters())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_attention_across_samples_is_found_in_the_first_layer(
    dtype: str, make_config: Callable[..., Config], weights_dir: Path
) -> None:
    _, backbone = load_halves(make_config(dtype), weights_dir)
    leaking = partial(backbone.run, neighbours_visible=True)
    assert find_leak(backbone, leaking) == "model.language_model.layers.0"
    backbone.run = leaking  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"see each other, first at model\.language_model\.layers\.0"):
        check_packing(backbone)


def test_another_token_mixer_makes_samples_run_one_by_one(
    make_config: Callable[..., Config], weights_dir: Path
) -> None:
    _, backbone = load_halves(make_config("float32"), weights_dir)
    layers = backbone.model.model.language_model.layers
    layers[2] = Shift(layers[2])
    with pytest.warns(UserWarning, match=r"layers\.2 mixes neighbouring tokens"):
        assert check_packing(backbone) == "one-by-one"
    assert backbone.one_by_one


def test_decoder_layers_are_those_of_the_backbone(make_config: Callable[..., Config], weights_dir: Path) -> None:
    _, backbone = load_halves(make_config("float32"), weights_dir)
    assert [name for name, _ in decoder_layers(backbone.model)] == [
        f"model.language_model.layers.{i}" for i in range(4)
    ]
