"""Each kind of discrepancy is seen and its module named; equal records pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.debug import Fault
from flowtrain.types import Module
from flowtrain.verify.compare import LIMITS, Check, Quantity, compare_step
from flowtrain.verify.record import StepRecord
from flowtrain.verify.verdict import OCCASIONS, Verdict, judge

MODULES = {
    "vision.weight": Module.ENCODER,
    "vision.bias": Module.ENCODER,
    "merger.weight": Module.PROJECTOR,
    "text.weight": Module.BACKBONE,
    "head.weight": Module.BACKBONE,
}
RATE = 1e-3


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype) for name in MODULES}


BEFORE = tensors(0)


def norms_of(gradients: dict[str, torch.Tensor]) -> dict[Module, float]:
    squares: dict[Module, float] = {}
    for name, gradient in gradients.items():
        squares[MODULES[name]] = squares.get(MODULES[name], 0.0) + float(gradient.square().sum())
    return {module: math.sqrt(square) for module, square in squares.items()}


def with_gradients(record: StepRecord, gradients: dict[str, torch.Tensor]) -> StepRecord:
    """A record whose norms follow from its gradients, as both sides compute them."""
    norms = norms_of(gradients)
    norm = math.sqrt(sum(value**2 for value in norms.values()))
    return replace(record, gradients=gradients, norms=norms, grad_norm=norm)


def make_record() -> StepRecord:
    gradients = tensors(1)
    plain = StepRecord(
        step=1,
        ids=("a", "b", "c"),
        trained_tokens=50,
        loss=2.5,
        norms={},
        grad_norm=0.0,
        rates=dict.fromkeys(Module, RATE),
        gradients={},
        parameters={name: tensor - RATE * gradients[name].sign() for name, tensor in BEFORE.items()},
        num_rows=3,
    )
    return with_gradients(plain, gradients)


@pytest.fixture
def record() -> StepRecord:
    return make_record()


def checks_of(run: StepRecord, reference: StepRecord, dtype: str = "float64") -> list[Check]:
    return compare_step(run, reference, MODULES, frozenset(MODULES), LIMITS[dtype], BEFORE, BEFORE)


def verdict_of(run: StepRecord, reference: StepRecord, dtype: str = "float64") -> Verdict:
    return judge(checks_of(run, reference, dtype), 1, 1)


def test_equal_records_pass(record: StepRecord) -> None:
    checks = checks_of(record, replace(record, ids=("c", "a", "b")))
    assert all(check.ok for check in checks)
    assert {check.quantity for check in checks} == set(Quantity)
    verdict = judge(checks, 1, 1)
    assert verdict.ok
    assert verdict.sentence.startswith("verify passed: 1 steps")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(name=st.sampled_from(sorted(MODULES)), place=st.integers(0, 29), over=st.floats(1.5, 1e6))
def test_one_wrong_number_of_a_gradient_names_its_module(dtype: str, name: str, place: int, over: float) -> None:
    record = make_record()
    gradients = {other: tensor.clone() for other, tensor in record.gradients.items()}
    gradients[name].view(-1)[place] += over * LIMITS[dtype].gradients * record.norms[MODULES[name]]
    verdict = verdict_of(replace(record, gradients=gradients), record, dtype)
    assert not verdict.ok
    assert verdict.modules == (MODULES[name],)
    assert verdict.quantity == "gradients"
    assert MODULES[name].value in verdict.sentence


@given(name=st.sampled_from(sorted(MODULES)), place=st.integers(0, 29), share=st.floats(0, 0.9))
def test_rounding_passes(name: str, place: int, share: float) -> None:
    record = make_record()
    gradients = {other: tensor.clone() for other, tensor in record.gradients.items()}
    gradients[name].view(-1)[place] += share * LIMITS["float64"].gradients * record.norms[MODULES[name]]
    parameters = {other: tensor.clone() for other, tensor in record.parameters.items()}
    parameters[name].view(-1)[place] += share * LIMITS["float64"].parameters
    assert verdict_of(replace(record, gradients=gradients, parameters=parameters), record).ok


@given(scale=st.floats(1e-3, 1e3).filter(lambda scale: abs(scale - 1) > 1e-6), module=st.sampled_from(list(Module)))
def test_common_factor_is_told(scale: float, module: Module) -> None:
    record = make_record()
    gradients = {n: g * scale if MODULES[n] is module else g for n, g in record.gradients.items()}
    verdict = verdict_of(with_gradients(record, gradients), record)
    assert verdict.modules == (module,)
    assert f"all {scale:.6g} × the reference" in verdict.sentence


@pytest.mark.parametrize("offset", [-1, 1])
def test_wrong_denominator_is_told_as_one_finding(offset: int, record: StepRecord) -> None:
    scale = record.trained_tokens / (record.trained_tokens + offset)
    run = with_gradients(record, {name: gradient * scale for name, gradient in record.gradients.items()})
    verdict = verdict_of(replace(run, loss=record.loss * scale), record)
    assert verdict.quantity == "denominator"
    assert verdict.modules == tuple(Module)
    assert f"({50 + offset} instead of 50 trained tokens would explain it)" in verdict.sentence


def test_gradients_in_other_places_have_no_factor(record: StepRecord) -> None:
    gradients = {**record.gradients, "merger.weight": record.gradients["merger.weight"].flip(0)}
    verdict = verdict_of(with_gradients(record, gradients), record)
    assert verdict.modules == (Module.PROJECTOR,)
    assert "×" not in verdict.sentence
    assert "merger.weight" in verdict.sentence


def test_wrong_loss_alone_fails(record: StepRecord) -> None:
    verdict = verdict_of(replace(record, loss=record.loss * (1 + 1e-9)), record)
    assert (verdict.ok, verdict.quantity) == (False, "loss")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_missing_and_extra_gradients_name_the_module(name: str, record: StepRecord) -> None:
    fewer = {other: gradient for other, gradient in record.gradients.items() if other != name}
    missing = verdict_of(replace(record, gradients=fewer), record)
    extra = verdict_of(record, replace(record, gradients=fewer))
    assert missing.modules == extra.modules == (MODULES[name],)
    assert f"only in the reference, such as {name}" in missing.sentence
    assert f"only in the run, such as {name}" in extra.sentence


def test_unknown_tensor_fails(record: StepRecord) -> None:
    verdict = verdict_of(replace(record, gradients={**record.gradients, "stranger": torch.zeros(2)}), record)
    assert "no parameter stranger" in verdict.sentence


def test_tensor_on_both_sides_of_the_run_fails(record: StepRecord) -> None:
    verdict = verdict_of(replace(record, repeated=("merger.weight",)), record)
    assert verdict.modules == (Module.PROJECTOR,)
    assert "both sides of the run hold merger.weight" in verdict.sentence


def test_wrong_update_with_right_gradients_names_the_module(record: StepRecord) -> None:
    for dtype, size in (("float64", 2e-8), ("float32", 2e-2 * RATE)):
        parameters = {**record.parameters, "merger.weight": record.parameters["merger.weight"] + size}
        verdict = verdict_of(replace(record, parameters=parameters), record, dtype)
        assert verdict.modules == (Module.PROJECTOR,)
        assert verdict.quantity == "parameters"
        assert "its gradients agree and its update does not" in verdict.sentence


def test_module_that_no_row_reaches_must_not_move(record: StepRecord) -> None:
    """A text-only step: no gradient of the encoder, parameters as before; the run decays them."""
    gradients = {name: gradient for name, gradient in record.gradients.items() if MODULES[name] is Module.BACKBONE}
    still = {name: BEFORE[name] for name in MODULES if MODULES[name] is not Module.BACKBONE}
    reference = replace(with_gradients(record, gradients), parameters={**record.parameters, **still})
    decayed = {name: tensor * (1 - 1e-5) for name, tensor in still.items() if MODULES[name] is Module.ENCODER}
    for dtype in LIMITS:
        assert verdict_of(reference, reference, dtype).ok
        verdict = verdict_of(replace(reference, parameters={**reference.parameters, **decayed}), reference, dtype)
        assert verdict.modules == (Module.ENCODER,)
        assert "no row of the step reaches the encoder" in verdict.sentence


def test_missing_parameters_fail_and_frozen_ones_may_be_left_out(record: StepRecord) -> None:
    fewer = {name: tensor for name, tensor in record.parameters.items() if MODULES[name] is not Module.ENCODER}
    run = replace(record, parameters=fewer)
    assert verdict_of(run, record).modules == (Module.ENCODER,)
    trained = frozenset(name for name, module in MODULES.items() if module is not Module.ENCODER)
    parameters = [
        check
        for check in compare_step(run, record, MODULES, trained, LIMITS["float64"], BEFORE, BEFORE)
        if check.quantity is Quantity.PARAMETERS
    ]
    assert {check.module for check in parameters} == {Module.PROJECTOR, Module.BACKBONE}
    assert all(check.ok for check in parameters)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_fail(bad: float, record: StepRecord) -> None:
    assert not verdict_of(replace(record, loss=bad), record).ok
    for field in ("gradients", "parameters"):
        poisoned = {name: tensor.clone() for name, tensor in getattr(record, field).items()}
        poisoned["text.weight"][0, 0] = bad
        verdict = verdict_of(replace(record, **{field: poisoned}), record)
        assert verdict.modules == (Module.BACKBONE,)


def test_wrong_shape_fails(record: StepRecord) -> None:
    parameters = {**record.parameters, "text.weight": record.parameters["text.weight"][:1]}
    assert verdict_of(replace(record, parameters=parameters), record).modules == (Module.BACKBONE,)


def test_wrong_rate_names_the_module(record: StepRecord) -> None:
    verdict = verdict_of(replace(record, rates={**record.rates, Module.ENCODER: 2 * RATE}), record)
    assert (verdict.quantity, verdict.modules) == ("rate", (Module.ENCODER,))


def test_norm_in_the_metrics_must_be_that_of_the_gradients(record: StepRecord) -> None:
    verdict = verdict_of(replace(record, norms={**record.norms, Module.ENCODER: 1.0}), record)
    assert (verdict.quantity, verdict.modules) == ("gradient norm", (Module.ENCODER,))


def test_rows_and_tokens_must_agree(record: StepRecord) -> None:
    assert "2 rows differ" in verdict_of(replace(record, ids=("a", "b", "d")), record).sentence
    assert "counts 4 rows" in verdict_of(replace(record, num_rows=4), record).sentence
    assert "no row was trained" in verdict_of(replace(record, ids=()), replace(record, ids=())).sentence
    tokens = verdict_of(replace(record, trained_tokens=51), record)
    assert "the run trained 51 tokens, the reference 50" in tokens.sentence


def test_first_step_that_fails_is_told(record: StepRecord) -> None:
    good = checks_of(record, record)
    encoder = with_gradients(record, {**record.gradients, "vision.bias": record.gradients["vision.bias"] * 2})
    all_wrong = with_gradients(record, {name: gradient + 1 for name, gradient in record.gradients.items()})
    second = [replace(check, step=2) for check in checks_of(encoder, record)]
    third = [replace(check, step=3) for check in checks_of(all_wrong, record)]
    verdict = judge([*good, *second, *third], 3, 3)
    assert (verdict.step, verdict.modules) == (2, (Module.ENCODER,))


def test_run_that_ended_early_fails(record: StepRecord) -> None:
    assert judge(checks_of(record, record), 5, 1).sentence == "verify failed: the run trained 1 of 5 steps"
    assert not judge([], 5, 0).ok


def test_a_planted_fault_that_nothing_shows_is_no_proof(record: StepRecord) -> None:
    assert OCCASIONS.keys() == set(get_args(Fault))
    for fault, (modules, _) in OCCASIONS.items():
        verdict = judge(checks_of(record, record), 1, 1, (fault,))
        assert not verdict.ok
        assert verdict.quantity == "faults"
        assert verdict.modules == modules
        assert fault in verdict.sentence
        assert all(module.value in verdict.sentence for module in modules)
