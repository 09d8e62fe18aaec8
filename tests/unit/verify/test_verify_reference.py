"""The plain loop is what it says: transformers' own loss, one sample at a time, torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, get_scheduler

from flowtrain.config.schema import Config, TrainConfig
from flowtrain.data.sources import RawRow
from flowtrain.errors import ConfigError
from flowtrain.types import Module
from flowtrain.verify.labels import example
from flowtrain.verify.model import build_model, decays, modules_of
from flowtrain.verify.reference import Reference, learning_rate

MakeReference = Callable[..., Reference]


def test_loss_is_that_of_transformers(make_reference: MakeReference, weights_dir: Path, rows: list[RawRow]) -> None:
    """The stock class loads the folder by itself and computes the mean loss of each row."""
    reference = make_reference("float32")
    model = AutoModelForImageTextToText.from_pretrained(weights_dir, dtype=torch.float32)
    for row in rows:
        inputs, labels = example(reference.processor, row)
        with torch.no_grad():
            expected = model(**inputs, labels=labels[None]).loss.item()
            loss, tokens = reference.loss_of(row)
        assert loss.item() / tokens == pytest.approx(expected, rel=1e-5)


def test_step_is_deterministic_and_independent_of_the_order_of_rows(
    make_reference: MakeReference, rows: list[RawRow]
) -> None:
    first, second = make_reference(), make_reference()
    for step in (1, 2):
        one, two = first.step(step, rows), second.step(step, rows[::-1])
        assert one.loss.hex() == two.loss.hex()
        assert all(torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)


def test_adopted_parameters_carry_rounding_on_and_hide_no_fault(
    make_reference: MakeReference, rows: list[RawRow]
) -> None:
    """Two loops a rounding apart are the same bits after an adoption; moments stay each loop's own."""
    first, second = make_reference(), make_reference()
    first.step(1, rows)
    second.step(1, rows)
    with torch.no_grad():
        for parameter in second.parameters.values():
            parameter.add_(1e-13)
    second.adopt(first.snapshot())
    one, two = first.step(2, rows), second.step(2, rows)
    assert one.loss.hex() == two.loss.hex()
    assert all(torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)

    for state in second.optimizer.state.values():
        state["exp_avg"].mul_(2)
    second.adopt(first.snapshot())
    one, two = first.step(3, rows), second.step(3, rows)
    assert any(not torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)


def test_gradients_are_of_the_mean_over_trained_tokens(make_reference: MakeReference, rows: list[RawRow]) -> None:
    """Against one backward of the whole step's loss.

    The division comes after it: this family's norms compute in float32, so that a gradient scaled before differs.
    """
    reference, plain = make_reference(), make_reference()
    record = reference.step(1, rows)
    terms = [plain.loss_of(row) for row in rows]
    tokens = sum(count for _, count in terms)
    sum(loss for loss, _ in terms).backward()
    assert record.trained_tokens == tokens
    expected = {name: parameter.grad / tokens for name, parameter in plain.parameters.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert record.grad_norm == pytest.approx(norm, rel=1e-10)
    for name, gradient in expected.items():
        assert float((record.gradients[name] - gradient).norm()) <= 1e-10 * norm, name


def test_clipping_bounds_what_the_optimizer_sees_and_not_what_is_recorded(
    make_reference: MakeReference, rows: list[RawRow]
) -> None:
    clipped, free = make_reference(clip_norm=1e-3), make_reference(clip_norm=None)
    one, two = clipped.step(1, rows), free.step(1, rows)
    assert one.grad_norm == two.grad_norm > 1e-2
    assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
    square = sum(float(parameter.grad.square().sum()) for parameter in clipped.parameters.values())
    assert math.sqrt(square) == pytest.approx(1e-3, rel=1e-3)


def test_text_only_step_leaves_the_vision_side_alone(make_reference: MakeReference, rows: list[RawRow]) -> None:
    reference = make_reference()
    before = reference.step(1, rows).parameters
    record = reference.step(2, [row for row in rows if not row.images])
    assert record.norms.keys() == {Module.BACKBONE}
    for name, module in reference.modules.items():
        same = torch.equal(before[name], record.parameters[name])
        assert same == (module is not Module.BACKBONE), name


@pytest.mark.parametrize("freeze", [("encoder",), ("encoder", "projector"), ("backbone",)], ids="+".join)
def test_frozen_modules_have_no_gradient_and_do_not_move(
    freeze: tuple[str, ...], make_reference: MakeReference, rows: list[RawRow]
) -> None:
    reference = make_reference(freeze=freeze)
    before = reference.snapshot()
    record = reference.step(1, rows[:3])
    for name, module in reference.modules.items():
        frozen = module.value in freeze
        assert (name in record.gradients) != frozen
        assert torch.equal(before[name], record.parameters[name]) == frozen, name
    assert {module.value for module in record.rates} == {module.value for module in Module} - set(freeze)


def test_row_trained_twice_counts_twice(make_reference: MakeReference, rows: list[RawRow]) -> None:
    once = make_reference().step(1, rows[:1])
    twice = make_reference().step(1, [rows[0], rows[0]])
    assert twice.trained_tokens == 2 * once.trained_tokens
    assert twice.loss == pytest.approx(once.loss, rel=1e-12)
    assert twice.ids == (rows[0].id, rows[0].id)


def test_step_without_a_row_changes_nothing(make_reference: MakeReference) -> None:
    reference = make_reference()
    before = reference.snapshot()
    record = reference.step(1, [])
    assert record.trained_tokens == 0
    assert not record.gradients
    assert all(torch.equal(before[name], record.parameters[name]) for name in before)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_is_that_of_transformers_after_the_warm_up(schedule: str) -> None:
    total, warmup, peak = 20, 4, 3e-4
    train = TrainConfig(max_steps=total, lr=1e-5, module_lr={"encoder": peak}, schedule=schedule, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    curve = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    for step in range(1, total + 1):
        rate = learning_rate(train, Module.ENCODER, step, total)
        if step > warmup:
            assert rate == pytest.approx(curve.get_last_lr()[0], rel=1e-12), step
        else:
            assert rate == pytest.approx(peak * step / warmup)
        optimizer.step()
        curve.step()
    assert learning_rate(train, Module.BACKBONE, warmup, total) == 1e-5


def test_every_parameter_has_one_owner_and_embeddings_norms_biases_do_not_decay(make_reference: MakeReference) -> None:
    reference = make_reference()
    table, decay = modules_of(reference.model), decays(reference.model)
    assert table.keys() == dict(reference.model.named_parameters()).keys()
    assert table["model.visual.patch_embed.proj.weight"] is Module.ENCODER
    assert table["model.visual.merger.linear_fc1.weight"] is Module.PROJECTOR
    assert table["model.visual.deepstack_merger_list.0.norm.weight"] is Module.PROJECTOR
    assert table["model.language_model.embed_tokens.weight"] is Module.BACKBONE
    assert decay["model.visual.patch_embed.proj.weight"]
    assert decay["model.language_model.layers.0.self_attn.q_proj.weight"]
    for name in (
        "model.visual.pos_embed.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.merger.norm.weight",
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "model.visual.blocks.0.attn.qkv.bias",
    ):
        assert not decay[name], name


def test_weights_that_do_not_fit_are_refused(weights_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors"):
        build_model(weights_dir, tmp_path, torch.float64, False)
    tensors = load_file(weights_dir / "model.safetensors")
    tensors["stranger"] = tensors.pop("model.language_model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing, 1 left over, such as model\.language_model.norm.weight"):
        build_model(weights_dir, tmp_path, torch.float64, False)


def test_weights_come_from_the_folder_and_stay_tied(weights_dir: Path) -> None:
    model = build_model(weights_dir, weights_dir, torch.float64, False)
    stored = load_file(weights_dir / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].double()), name
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_bfloat16_is_refused(make_config: Callable[..., Config], weights_dir: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16 cannot be verified"):
        Reference(make_config("bfloat16"), weights_dir, 1)
