"""A run's step against the reference's step, quantity by quantity and module by module (contract C2).

| order | quantity | of | float64 | float32 |
|---|---|---|---|---|
| 1 | rows, trained tokens | step | equal | equal |
| 2 | loss | step | 1e-10 relative | 1e-6 |
| 2 | gradients | module | 1e-9 of the module's norm, each parameter | 1e-5 |
| 3 | gradient norm | module, all | 1e-9 relative | 1e-5 |
| 4 | learning rate | module | 1e-12 relative | 1e-12 |
| 5 | parameters after the update | module | 1e-8 absolute | 1e-3 of the module's update |

Families that compute in float32 inside have wider limits in float64 (`FLOAT32_INSIDE`).

Gradients are compared before clipping and the optimizer, which hide a wrong scale; parameters after them, which shows
a wrong clip, rate or decay. Both sides go on from their own parameters, so a fault spreads from the step in which it
arises: `verdict.py` speaks of the first step that fails.

Invariants: a difference that is NaN fails; a tensor on one side only fails, and so does one that both sides of a run
hold; every trained parameter is compared, every frozen one that is given must not have moved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from flowtrain.types import Module
from flowtrain.verify.record import StepRecord
from flowtrain.verify.tensors import (
    Tensors,
    common_factor,
    distance,
    largest,
    norm_of,
    of_module,
    presence,
    repeated,
    update_difference,
)


class Quantity(IntEnum):
    """What is compared, in the order in which a fault would show."""

    ROWS = 0
    TOKENS = 1
    LOSS = 2
    GRADIENTS = 3
    GRADIENT_NORM = 4
    RATE = 5
    PARAMETERS = 6

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest differences allowed. `update`: of parameters, the relative size of their update's difference counts."""

    loss: float
    gradients: float
    parameters: float
    rate: float = 1e-12
    update: bool = False


LIMITS = {"float64": Limits(1e-10, 1e-9, 1e-8), "float32": Limits(1e-6, 1e-5, 1e-3, update=True)}

FLOAT32_INSIDE = dict.fromkeys(("gemma3", "glm4v", "glm4v_moe"), Limits(1e-9, 1e-7, 1e-6))
"""Families that compute some sums of gradients in float32 whatever the dtype (norm weights; interpolated positions):
adding them up by packs instead of by rows rounds otherwise. Their limits in float64; `model_type` → limits."""


def limits_of(family: str, dtype: str) -> Limits:
    return FLOAT32_INSIDE.get(family, LIMITS[dtype]) if dtype == "float64" else LIMITS[dtype]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        module: None: of the whole step.
        note: what a person should know when it fails.
        scale: the one factor by which the run's value is off, where there is one.
        trained_tokens: the reference's denominator of this step.
    """

    step: int
    quantity: Quantity
    module: Module | None
    value: float
    limit: float
    note: str = ""
    scale: float | None = None
    trained_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.value <= self.limit

    @property
    def name(self) -> str:
        return self.quantity.text if self.module is None else f"{self.quantity.text}/{self.module.value}"

    @property
    def shown(self) -> float:
        """The value, or infinity where it is not a number."""
        return math.inf if math.isnan(self.value) else self.value


def compare_step(
    run: StepRecord,
    reference: StepRecord,
    modules: Mapping[str, Module],
    trained: frozenset[str],
    limits: Limits,
    before_run: Tensors,
    before_reference: Tensors,
) -> list[Check]:
    """Every check of one step.

    Args:
        modules: owner of every parameter of the whole model.
        trained: parameters of modules that are not frozen.
        before_run: the run's parameters before this step (those it has written); `before_reference`: the reference's.
    """
    step = reference.step
    checks = [_rows(run, reference), _tokens(run, reference)]
    checks.append(_loss(run, reference, limits))
    checks += _gradients(run, reference, modules, limits)
    checks += _norms(run, reference, limits)
    checks += [
        Check(step, Quantity.RATE, module, relative(run.rates.get(module, math.nan), rate), limits.rate)
        for module, rate in reference.rates.items()
    ]
    agreed = {check.module for check in checks if check.quantity is Quantity.GRADIENTS and check.ok and check.module}
    checks += _parameters(run, reference, modules, trained, limits, before_run, before_reference, agreed)
    return checks


def relative(value: float, expected: float) -> float:
    """|value - expected| / |expected|; 0 when both are 0."""
    if value == expected:
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(run: StepRecord, reference: StepRecord) -> Check:
    wrong = Counter(run.ids)
    wrong.subtract(reference.ids)
    num_wrong = sum(abs(count) for count in wrong.values())
    note = f"{num_wrong} rows differ" if num_wrong else ""
    if not reference.ids:
        num_wrong, note = 1, "no row was trained"
    elif run.num_rows is not None and run.num_rows != len(run.ids):
        num_wrong += abs(run.num_rows - len(run.ids))
        note = f"metrics.jsonl counts {run.num_rows} rows, samples.jsonl names {len(run.ids)}"
    return Check(reference.step, Quantity.ROWS, None, float(num_wrong), 0.0, note)


def _tokens(run: StepRecord, reference: StepRecord) -> Check:
    difference = run.trained_tokens - reference.trained_tokens
    note = (
        f"the run trained {run.trained_tokens} tokens, the reference {reference.trained_tokens}" if difference else ""
    )
    return Check(reference.step, Quantity.TOKENS, None, float(abs(difference)), 0.0, note)


def _loss(run: StepRecord, reference: StepRecord, limits: Limits) -> Check:
    value = relative(run.loss, reference.loss)
    scale = run.loss / reference.loss if reference.loss else None
    return Check(reference.step, Quantity.LOSS, None, value, limits.loss, "", scale, reference.trained_tokens)


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradients(run: StepRecord, reference: StepRecord, modules: Mapping[str, Module], limits: Limits) -> list[Check]:
    step = reference.step
    checks = []
    for module in Module:
        expected = of_module(module, reference.gradients, modules)
        given = of_module(module, run.gradients, modules)
        if not expected and not given:
            continue
        note = presence(given, expected, "gradient") or repeated(run.repeated, module, modules)
        if note:
            checks.append(Check(step, Quantity.GRADIENTS, module, math.inf, limits.gradients, note))
            continue
        norm = norm_of(expected)
        worst, value = "", 0.0
        for name, gradient in expected.items():
            difference = distance(given[name], gradient)
            share = difference / norm if norm else (0.0 if difference == 0 else math.inf)
            if share > value:
                worst, value = name, share
        note, scale = "", None
        if not value <= limits.gradients:
            factor = common_factor(given, expected)
            if factor.explains(limits.gradients):
                note, scale = f"all {factor.scale:.6g} × the reference", factor.scale
            else:
                note = f"largest in {worst}"
        checks.append(Check(step, Quantity.GRADIENTS, module, value, limits.gradients, note, scale))
    unknown = sorted(run.gradients.keys() - modules.keys())
    if unknown:
        note = f"the model has no parameter {unknown[0]}"
        checks.append(Check(step, Quantity.GRADIENTS, None, math.inf, limits.gradients, note))
    return checks


def _norms(run: StepRecord, reference: StepRecord, limits: Limits) -> list[Check]:
    """Norms as the run reports them in its metrics, which is what it clips by."""
    step = reference.step
    checks = []
    for module in Module:
        if module in run.norms or module in reference.norms:
            value = relative(run.norms.get(module, math.nan), reference.norms.get(module, math.nan))
            checks.append(Check(step, Quantity.GRADIENT_NORM, module, value, limits.gradients))
    value = relative(run.grad_norm, reference.grad_norm)
    checks.append(Check(step, Quantity.GRADIENT_NORM, None, value, limits.gradients))
    return checks


# --- parameters -------------------------------------------------------------------------------------------------------


def _parameters(
    run: StepRecord,
    reference: StepRecord,
    modules: Mapping[str, Module],
    trained: frozenset[str],
    limits: Limits,
    before_run: Tensors,
    before_reference: Tensors,
    agreed: Collection[Module],
) -> list[Check]:
    """`agreed`: modules whose gradients of this step are the same on both sides."""
    step = reference.step
    checks = []
    for module in Module:
        given = of_module(module, run.parameters, modules)
        expected = of_module(module, reference.parameters, modules)
        must = {name for name in expected if name in trained}
        note = repeated(run.repeated, module, modules)
        missing = sorted(must - given.keys())
        if missing:
            note = f"{len(missing)} of {len(must)} parameters are missing from the run, such as {missing[0]}"
        if note:
            checks.append(Check(step, Quantity.PARAMETERS, module, math.inf, limits.parameters, note))
        elif given:
            value = (
                update_difference(given, expected, before_run, before_reference)
                if limits.update
                else max(largest(given[name], expected[name]) for name in given)
            )
            note = "" if value <= limits.parameters else _cause(module, reference, modules, agreed)
            checks.append(Check(step, Quantity.PARAMETERS, module, value, limits.parameters, note))
    return checks


def _cause(module: Module, reference: StepRecord, modules: Mapping[str, Module], agreed: Collection[Module]) -> str:
    if not of_module(module, reference.gradients, modules):
        return f"no row of the step reaches the {module.value}, and yet its parameters differ"
    if module in agreed:
        return "its gradients agree and its update does not: look at clipping, learning rate and decay"
    return ""
