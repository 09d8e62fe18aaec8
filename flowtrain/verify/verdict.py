"""From many checks to one sentence: what failed first, in which modules, and how.

    checks ─▶ first step that fails ─▶ rows or tokens?   they differ, nothing else can be equal
                                       loss, gradients?  the modules whose gradients differ (a common factor is named)
                                       else              the modules whose rate or parameters differ

A wrong denominator scales the loss and every module alike; that is said as one finding, with the number of tokens that
would explain it. The norm over all modules follows from the modules' own, so it is not blamed where one of them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.types import Module
from flowtrain.verify.compare import Check, Quantity

OCCASIONS: dict[str, tuple[tuple[Module, ...], str]] = {
    "encoder_gradient_doubled": ((Module.ENCODER,), "an encoder that trains"),
    "encoder_gradient_divided_by_producers": ((Module.ENCODER,), "an encoder that trains on two or more producers"),
    "denominator_plus_one": (tuple(Module), "a trained token"),
    "denominator_minus_one": (tuple(Module), "a step of two or more trained tokens"),
    "image_gradient_dropped": ((Module.ENCODER,), "an encoder that trains and a row with an image in step 1"),
    "images_swapped": ((Module.ENCODER,), "two different images of the same size in one encode unit"),
    "module_not_clipped": ((Module.PROJECTOR,), "a projector that trains and a gradient norm above train.clip_norm"),
    "sample_sees_neighbour": ((Module.BACKBONE,), "two rows in one pack"),
    "stale_encoder": ((Module.ENCODER,), "an encoder that trains, and a second step"),
    "text_only_step_decays_encoder": (
        (Module.ENCODER,),
        "a step without an image and train.weight_decay above 0 (fewer rows a step: train.step.samples)",
    ),
}
"""Planted fault → the modules it lies in, and what a run must have for it to act."""

SAME_FACTOR = 1e-6
"""Modules' factors this close, relatively, count as one and the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`modules`: those in which the first failing step fails, in the order encoder, projector, backbone."""

    ok: bool
    sentence: str
    step: int | None = None
    quantity: str | None = None
    modules: tuple[Module, ...] = ()


def judge(checks: Sequence[Check], num_steps: int, steps_trained: int, faults: Sequence[str] = ()) -> Verdict:
    """The verdict over all steps; `num_steps` were asked for, the run trained `steps_trained`.

    A check that a fault was planted for and that sees nothing has failed too: it proves nothing.
    """
    failed = [check for check in checks if not check.ok]
    if failed:
        return _fault(failed)
    if steps_trained < num_steps or not checks:
        return Verdict(False, f"verify failed: the run trained {steps_trained} of {num_steps} steps", quantity="steps")
    if faults:
        return _unseen(faults, num_steps)
    return Verdict(True, f"verify passed: {num_steps} steps, {len(checks)} comparisons within their limits")


def _unseen(faults: Sequence[str], num_steps: int) -> Verdict:
    modules = tuple(module for module in Module if any(module in OCCASIONS[fault][0] for fault in faults))
    told = "; ".join(
        f"the planted fault {fault} of {_names(OCCASIONS[fault][0])} had no occasion, which is {OCCASIONS[fault][1]}"
        for fault in faults
    )
    return Verdict(False, f"verify failed: in {num_steps} steps {told}", quantity="faults", modules=modules)


def _fault(failed: Sequence[Check]) -> Verdict:
    step = min(check.step for check in failed)
    here = [check for check in failed if check.step == step]
    for quantity in (Quantity.ROWS, Quantity.TOKENS):
        for check in here:
            if check.quantity is quantity:
                text = f"verify failed at step {step}: {quantity.text}: {check.note}"
                return Verdict(False, text, step, quantity.text)
    gradients = [check for check in here if check.quantity in (Quantity.GRADIENTS, Quantity.GRADIENT_NORM)]
    loss = [check for check in here if check.quantity is Quantity.LOSS]
    if loss or gradients:
        return _of_gradients(step, loss, gradients)
    rest = [check for check in here if check.quantity is min(check.quantity for check in here)]
    return _of_modules(step, rest[0].quantity, rest)


def _of_gradients(step: int, loss: Sequence[Check], gradients: Sequence[Check]) -> Verdict:
    own = [check for check in gradients if check.quantity is Quantity.GRADIENTS] or list(gradients)
    modules = _modules(own)
    scales = [check.scale for check in (*loss, *own) if check.module is not None or check.quantity is Quantity.LOSS]
    if loss and modules and None not in scales and _alike([scale for scale in scales if scale is not None]):
        scale, tokens = scales[0], loss[0].trained_tokens
        assert scale is not None
        text = (
            f"verify failed at step {step}: loss and gradients of {_names(modules)} are all {scale:.6g} × the "
            f"reference: a wrong denominator ({tokens / scale:.6g} instead of {tokens} trained tokens would explain it)"
        )
        return Verdict(False, text, step, "denominator", modules)
    if not own:
        text = f"verify failed at step {step}: the loss differs by {loss[0].value:.2g} (limit {loss[0].limit:.0e})"
        return Verdict(False, text, step, Quantity.LOSS.text)
    verdict = _of_modules(step, own[0].quantity, own)
    if not loss:
        return verdict
    sentence = f"{verdict.sentence}; the loss differs by {loss[0].value:.2g}"
    return Verdict(False, sentence, step, verdict.quantity, verdict.modules)


def _of_modules(step: int, quantity: Quantity, checks: Sequence[Check]) -> Verdict:
    parts = []
    for check in checks:
        name = check.module.value if check.module is not None else "all modules"
        note = f", {check.note}" if check.note else ""
        parts.append(f"{name} ({check.value:.2g}, limit {check.limit:.0e}{note})")
    text = f"verify failed at step {step}: {quantity.text} of {', '.join(parts)}"
    return Verdict(False, text, step, quantity.text, _modules(checks))


def _modules(checks: Sequence[Check]) -> tuple[Module, ...]:
    blamed = {check.module for check in checks}
    return tuple(module for module in Module if module in blamed)


def _names(modules: Sequence[Module]) -> str:
    *first, last = [module.value for module in modules]
    return f"{', '.join(first)} and {last}" if first else last


def _alike(scales: Sequence[float]) -> bool:
    return max(scales) - min(scales) <= SAME_FACTOR * abs(scales[0])
