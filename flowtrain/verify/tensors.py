"""Differences between named tensors, in float64. What cannot be compared, or is not finite, is infinitely far apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from flowtrain.types import Module

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Factor:
    """How a run's gradients of one module relate to the reference's: `scale`, and what that scale does not explain."""

    scale: float
    rest: float

    def explains(self, limit: float) -> bool:
        return math.isfinite(self.scale) and self.rest <= max(limit, 1e-7) and abs(self.scale - 1) > limit


def of_module(module: Module, tensors: Tensors, modules: Mapping[str, Module]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if modules.get(name) is module}


def presence(given: Tensors, expected: Tensors, what: str) -> str:
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing:
        return f"{len(missing)} parameters have a {what} only in the reference, such as {missing[0]}"
    if extra:
        return f"{len(extra)} parameters have a {what} only in the run, such as {extra[0]}"
    return ""


def repeated(names: Iterable[str], module: Module, modules: Mapping[str, Module]) -> str:
    """The complaint about a tensor that both sides of a run hold, or nothing."""
    own = [name for name in names if modules.get(name) is module]
    return f"both sides of the run hold {own[0]}" if own else ""


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """‖tensor - expected‖ in float64; infinite when the shapes differ."""
    if tensor.shape != expected.shape:
        return math.inf
    return _or_infinity(float((tensor.double() - expected.double()).norm()))


def largest(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    if tensor.shape != expected.shape:
        return math.inf
    return _or_infinity(float((tensor.double() - expected.double()).abs().max())) if tensor.numel() else 0.0


def _or_infinity(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def common_factor(given: Tensors, expected: Tensors) -> Factor:
    """The least-squares scale between two sets of the same tensors."""
    product = sum(float((given[name].double() * tensor.double()).sum()) for name, tensor in expected.items())
    square = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    if not square or not math.isfinite(product):
        return Factor(math.nan, math.inf)
    scale = product / square
    rest = math.sqrt(sum(distance(given[name], tensor.double() * scale) ** 2 for name, tensor in expected.items()))
    return Factor(scale, rest / (abs(scale) * math.sqrt(square)) if scale else math.inf)


def update_difference(given: Tensors, expected: Tensors, before_run: Tensors, before_reference: Tensors) -> float:
    """‖(run's update) - (reference's update)‖ / ‖reference's update‖."""
    difference, size = 0.0, 0.0
    for name, tensor in given.items():
        update = expected[name].double() - before_reference[name].double()
        moved = tensor.double() - before_run.get(name, before_reference[name]).double()
        difference += distance(moved, update) ** 2
        size += float(update.square().sum())
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size else math.inf
