"""Notices a module that should train and gets no gradient: cut off by a mistake, it would never be missed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowtrain.types import Module

STEPS = 5
"""Steps in a row, of those that reach a module, after which a gradient of exactly 0 is no accident."""


class Unreached:
    """`trains`: the modules that do. The backbone is reached by every row, the others by rows with images."""

    def __init__(self, trains: Iterable[Module]) -> None:
        self._steps = dict.fromkeys(trains, 0)

    def saw(self, norms: Mapping[Module, float], has_images: bool) -> list[Module]:
        """Modules to warn of now, each once in a run; `norms`: of the step's gradients, of modules that have any."""
        found = []
        for module in list(self._steps):
            if norms.get(module):
                self._steps[module] = 0
            elif has_images or module is Module.BACKBONE:
                self._steps[module] += 1
            if self._steps[module] == STEPS:
                found.append(module)
                del self._steps[module]
        return found
