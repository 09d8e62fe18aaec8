"""One rank's update: scale, clip, AdamW, what is left alone, dumps and planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from update_reference import (
    MODULE_OF,
    RATES,
    TRAIN,
    give_gradients,
    gradient,
    make_parameters,
    make_updater,
    order,
    train_steps,
)

from flowtrain.config.schema import TrainConfig
from flowtrain.parallel.groups import Groups
from flowtrain.plan import Layout
from flowtrain.types import Module, Role
from flowtrain.update.optimizer import decays
from flowtrain.update.peak import peak_memory_bytes
from flowtrain.update.updater import Updater, square_sum

IMAGE_SIDE = frozenset({Module.ENCODER, Module.PROJECTOR})


def copies(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in updater.parameters.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: torch.equal(left[name], right[name]) for name in left}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_plain_adamw_loop(dtype: torch.dtype) -> None:
    updater = make_updater(dtype=dtype)
    plain = make_parameters(dtype)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "lr": RATES[MODULE_OF[name]],
                "weight_decay": TRAIN.weight_decay if decays(name, parameter) else 0.0,
            }
            for name, parameter in plain.items()
        ],
        betas=TRAIN.betas,
        eps=TRAIN.eps,
        foreach=False,
    )
    for step in range(1, 7):
        left_out = IMAGE_SIDE if step % 3 == 0 else frozenset()
        for parameters in (updater.parameters, plain):
            give_gradients(parameters, step, left_out=left_out)
        updater.reduce()
        updater.update(order(step))
        for parameter in plain.values():
            if parameter.grad is not None:
                parameter.grad *= 0.25 * 0.5
        optimizer.step()
        optimizer.zero_grad()
    tolerance = 1e-13 if dtype is torch.float64 else 2e-6
    for name, parameter in plain.items():
        torch.testing.assert_close(updater.parameters[name], parameter, rtol=0, atol=tolerance)


def test_square_sums_are_float64_sums_of_reached_modules_only() -> None:
    updater = make_updater()
    give_gradients(updater.parameters, 1, left_out=IMAGE_SIDE)
    sums = updater.reduce()
    assert sums.keys() == {Module.BACKBONE}
    expected = sum(
        gradient(name, 1, 0, torch.float32).double().square().sum().item()
        for name, module in MODULE_OF.items()
        if module is Module.BACKBONE
    )
    assert sums[Module.BACKBONE] == pytest.approx(expected, rel=1e-15)


def test_a_module_that_no_sample_reached_is_left_alone() -> None:
    updater = make_updater()
    train_steps(updater, range(1, 3))
    before = copies(updater)
    moments = {
        name: updater.optimizer.state[parameter]["exp_avg"].clone() for name, parameter in updater.parameters.items()
    }
    train_steps(updater, range(3, 4))
    for name, unchanged in same(before, copies(updater)).items():
        assert unchanged == (MODULE_OF[name] in IMAGE_SIDE), name
        state = updater.optimizer.state[updater.parameters[name]]
        assert torch.equal(moments[name], state["exp_avg"]) == unchanged, name


def test_a_step_left_out_drops_the_gradients() -> None:
    updater = make_updater()
    before = copies(updater)
    give_gradients(updater.parameters, 1)
    updater.reduce()
    updater.update(order(1, clip=0.0, apply=False))
    assert all(same(before, copies(updater)).values())
    assert all(parameter.grad is None for parameter in updater.parameters.values())
    assert not updater.optimizer.state


def test_frozen_parameters_are_in_no_group() -> None:
    updater = make_updater(TrainConfig(freeze=("encoder",), weight_decay=0.1, lr=1e-2))
    members = {id(parameter) for group in updater.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in updater.parameters.items():
        assert (id(parameter) in members) == (MODULE_OF[name] is not Module.ENCODER), name
    before = copies(updater)
    train_steps(updater, range(1, 3))
    assert {MODULE_OF[name] for name, unchanged in same(before, copies(updater)).items() if unchanged} == {
        Module.ENCODER
    }


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", (4, 4), True),
        ("model.language_model.layers.0.mlp.up_proj.bias", (4,), False),
        ("model.language_model.layers.0.input_layernorm.weight", (4,), False),
        ("model.language_model.embed_tokens.weight", (4, 4), False),
        ("model.visual.pos_embed.weight", (4, 4), False),
        ("model.visual.pos_embed", (1, 4, 4), False),
        ("model.vision_tower.embeddings.position_embedding.weight", (4, 4), False),
        ("model.visual.patch_embed.proj.weight", (4, 3, 2, 2), True),
        ("model.vision_tower.embeddings.patch_embedding.weight", (4, 3, 2, 2), True),
        ("model.image_newline", (4,), False),
        ("lm_head.weight", (4, 4), True),
    ],
)
def test_decay_exclusions(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, torch.zeros(shape)) is expected


def test_dump_holds_scaled_unclipped_gradients_and_the_new_parameters(tmp_path: Path) -> None:
    updater = Updater(make_parameters(), MODULE_OF, TRAIN, Groups(Layout(), 0), frozenset(), Role.PRODUCER)
    give_gradients(updater.parameters, 1, left_out=frozenset({Module.BACKBONE}))
    updater.reduce()
    updater.update(order(1, clip=0.125, gradients_to=str(tmp_path / "step-1")))
    gradients = load_file(tmp_path / "step-1" / "producer-gradients-0.safetensors")
    assert gradients.keys() == {name for name, module in MODULE_OF.items() if module is not Module.BACKBONE}
    for name, tensor in gradients.items():
        assert torch.equal(tensor, gradient(name, 1, 0, torch.float32) * 0.25)
    parameters = load_file(tmp_path / "step-1" / "producer-parameters-0.safetensors")
    assert all(same(parameters, copies(updater)).values())
    assert parameters.keys() == MODULE_OF.keys()


def test_only_the_first_rank_dumps(tmp_path: Path) -> None:
    updater = Updater(make_parameters(), MODULE_OF, TRAIN, Groups(Layout(dp_replicate=2), 1, {("dp_replicate",): None}))
    give_gradients(updater.parameters, 1)
    updater.update(order(1, gradients_to=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "changed"),
    [("module_not_clipped", Module.PROJECTOR), ("text_only_step_decays_encoder", Module.ENCODER)],
)
def test_a_planted_fault_changes_one_module_only(fault: str, changed: Module) -> None:
    sound, faulty = make_updater(), make_updater(faults=frozenset({fault}))
    for updater in (sound, faulty):
        train_steps(updater, range(1, 4))
    different = {MODULE_OF[name] for name, equal in same(copies(sound), copies(faulty)).items() if not equal}
    assert different == {changed}


def test_moments_follow_the_parameter_and_bias_stays_without_decay() -> None:
    parameters = {"a.weight": nn.Parameter(torch.ones(2, 2)), "a.bias": nn.Parameter(torch.ones(2))}
    modules = dict.fromkeys(parameters, Module.BACKBONE)
    updater = Updater(parameters, modules, TrainConfig(weight_decay=0.5, lr=0.1), Groups(Layout(), 0))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    updater.update(order(1, clip=1.0))
    assert torch.equal(parameters["a.bias"], torch.ones(2))
    torch.testing.assert_close(parameters["a.weight"].detach(), torch.full((2, 2), 1 - 3e-3 * 0.5))


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory_bytes()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    assert before > 2**20
    assert peak_memory_bytes() >= before


@pytest.mark.parametrize("family", ["Qwen3VL", "Llava", "Gemma3", "SmolVLM"])
def test_decay_by_name_agrees_with_the_kind_of_layer(family: str) -> None:
    """Every matrix of a linear or convolution layer decays; nothing of an embedding table or a norm does."""
    import transformers

    config = getattr(transformers, f"{family}Config")()
    for part in (config.text_config, config.vision_config):
        for count in ("num_hidden_layers", "depth"):
            if hasattr(part, count):
                setattr(part, count, 1)
    if hasattr(config.text_config, "layer_types"):
        config.text_config.layer_types = config.text_config.layer_types[:1]
    if hasattr(config.vision_config, "deepstack_visual_indexes"):
        config.vision_config.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    seen = 0
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            seen += 1
            is_matrix = isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) and name.endswith(".weight")
            if is_matrix and "lm_head" not in name:
                assert decays(name, parameter), name
            elif isinstance(layer, nn.Embedding) or "Norm" in type(layer).__name__ or name.endswith("bias"):
                assert not decays(name, parameter), name
    assert seen > 10


@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (300, 777)])
def test_squares_are_summed_in_float64_whatever_the_size(shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e4
    for tensor in (numbers, numbers.T if numbers.dim() == 2 else numbers):
        assert square_sum(tensor) == pytest.approx(float(numbers.double().square().sum()), rel=1e-13, abs=0)
