"""The two halves compute what the uncut model computes, for both cuts and every freezing (contracts C2, C4, C5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models_reference import MODEL_DIR, Outcome, Row, load_halves, run_cut, run_whole
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from flowtrain.config.schema import Config
from flowtrain.models.backbone import PackSample
from flowtrain.models.table import module_of_name

PREFIXES = {
    "encoder": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
    "projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    "backbone": ("model.language_model", "lm_head"),
}
FREEZES = [(), ("encoder",), ("encoder", "projector"), ("encoder", "backbone"), ("backbone",), ("projector",)]


def assert_same(outcome: Outcome, expected: Outcome, loss_limit: float, gradient_limit: float) -> None:
    assert outcome.trained == expected.trained
    assert outcome.loss == pytest.approx(expected.loss, rel=loss_limit)
    assert outcome.gradients.keys() == expected.gradients.keys()
    square_sums: dict[object, float] = {}
    differences: dict[object, float] = {}
    for name, gradient in expected.gradients.items():
        module = module_of_name(name)
        difference = float((outcome.gradients[name].double() - gradient.double()).square().sum())
        square_sums[module] = square_sums.get(module, 0.0) + float(gradient.double().square().sum())
        differences[module] = differences.get(module, 0.0) + difference
    for module, difference in differences.items():
        assert square_sums[module] > 0
        assert difference**0.5 <= gradient_limit * square_sums[module] ** 0.5, module


@pytest.mark.parametrize("freeze", FREEZES, ids="+".join)
def test_packs_equal_single_rows_in_float64(
    freeze: tuple[str, ...], rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    frozen = tuple(prefix for name in freeze for prefix in PREFIXES[name])
    expected = run_whole(weights_dir, rows, torch.float64, frozen)
    config = make_config(freeze=freeze)
    encoder, backbone = load_halves(config, weights_dir)
    producer_trains = any(p.requires_grad for p in encoder.parameters_by_name().values())
    outcome = run_cut(encoder, backbone, [[rows[2], rows[1], rows[0]], [rows[3], rows[4]]], producer_trains)
    assert_same(outcome, expected, 1e-10, 1e-9)


def test_packs_equal_single_rows_in_float32(
    rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    expected = run_whole(weights_dir, rows, torch.float32)
    outcome = run_cut(*load_halves(make_config("float32"), weights_dir), [rows[:3], rows[3:]], True)
    assert_same(outcome, expected, 1e-6, 1e-5)


@pytest.mark.parametrize("freeze", [(), ("encoder",)], ids="+".join)
def test_gradient_checkpointing_changes_nothing(
    freeze: tuple[str, ...], rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    outcomes = [
        run_cut(*load_halves(make_config(freeze=freeze, gradient_checkpointing=flag), weights_dir), [rows], not freeze)
        for flag in (False, True)
    ]
    assert_same(outcomes[1], outcomes[0], 1e-14, 1e-12)


def test_sixteen_bit_follows_float32(rows: list[Row], make_config: Callable[..., Config], weights_dir: Path) -> None:
    expected = run_whole(weights_dir, rows, torch.float64)
    encoder, backbone = load_halves(make_config("bfloat16"), weights_dir)
    assert encoder.encode([rows[0].inputs])[0][0].dtype is torch.bfloat16
    outcome = run_cut(encoder, backbone, [rows], True)
    assert all(p.dtype is torch.float32 for p in encoder.parameters_by_name().values())
    assert all(gradient.dtype is torch.float32 for gradient in outcome.gradients.values())
    assert_same(outcome, expected, 2e-2, 1e-1)


def test_a_processed_row_goes_through_as_it_is(make_config: Callable[..., Config], weights_dir: Path) -> None:
    """Real pictures of two sizes; the plain model gets everything that the processor returns, token types too."""
    processor = AutoProcessor.from_pretrained(MODEL_DIR)
    pictures = [Image.new("RGB", (48, 32), "red"), Image.linear_gradient("L").resize((32, 64)).convert("RGB")]
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}])
    processed = processor(text=[prompt], images=pictures, return_tensors="pt")
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL_DIR), dtype=torch.float64)
    model.load_state_dict(load_file(weights_dir / "model.safetensors"), strict=False)
    expected = model(**processed).logits[0, :-1]

    encoder, backbone = load_halves(make_config(), weights_dir)
    inputs = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
    input_ids = processed["input_ids"][0]
    [features] = encoder.encode([inputs])
    sample = PackSample(input_ids, input_ids, features, inputs["image_grid_thw"])
    for pack, place in (([sample], 0), ([PackSample(input_ids[:4], input_ids[:4]), sample], 3)):
        logits, targets = backbone.run(pack)
        torch.testing.assert_close(logits[place:], expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(targets[place:], input_ids[1:])


def test_text_only_pack_leaves_the_projector_alone(
    rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    encoder, backbone = load_halves(make_config(freeze=("encoder",)), weights_dir)
    outcome = run_cut(encoder, backbone, [[rows[1], rows[3]]], False)
    assert not any("merger" in name for name in outcome.gradients)
    assert encoder.encode([]) == []


def test_visible_neighbours_change_the_loss(
    rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    expected = run_whole(weights_dir, rows, torch.float64)
    planted = run_cut(*load_halves(make_config(), weights_dir), [rows], True, neighbours_visible=True)
    assert abs(planted.loss - expected.loss) > 1e-6 * expected.loss


def test_empty_pack_and_masked_sample(rows: list[Row], make_config: Callable[..., Config], weights_dir: Path) -> None:
    encoder, backbone = load_halves(make_config(), weights_dir)
    loss, trained = backbone.loss([])
    assert (loss.item(), trained, loss.requires_grad) == (0.0, 0, False)
    masked = Row(rows[1].input_ids, torch.full_like(rows[1].labels, -100), None)
    both = run_cut(encoder, backbone, [[rows[0], masked]], True)
    fresh = run_cut(*load_halves(make_config(), weights_dir), [[rows[0]]], True)
    assert both.trained == fresh.trained
    assert_same(both, fresh, 1e-12, 1e-11)
    assert run_cut(encoder, backbone, [[masked]], True).loss == 0.0


def test_first_token_of_a_sample_is_never_predicted(
    rows: list[Row], make_config: Callable[..., Config], weights_dir: Path
) -> None:
    """A label on the first token has nothing before it that may predict it: alone or in a pack it is left out."""
    everything = Row(rows[1].input_ids, rows[1].input_ids.clone(), None)
    _, backbone = load_halves(make_config(), weights_dir)
    assert run_cut(*load_halves(make_config(), weights_dir), [[everything, everything]], True).trained == 2 * (12 - 1)
    pair, _ = backbone.loss([_plain(everything), _plain(everything)])
    single, _ = backbone.loss([_plain(everything)])
    assert pair.item() == pytest.approx(2 * single.item(), rel=1e-12)


def test_one_by_one_equals_packed(rows: list[Row], make_config: Callable[..., Config], weights_dir: Path) -> None:
    encoder, backbone = load_halves(make_config(), weights_dir)
    packed = run_cut(encoder, backbone, [rows], True)
    encoder, backbone = load_halves(make_config(), weights_dir)
    backbone.one_by_one = True
    assert_same(run_cut(encoder, backbone, [rows], True), packed, 1e-12, 1e-11)


def _plain(row: Row) -> PackSample:
    return PackSample(row.input_ids, row.labels)
