"""A module that trains and gets no gradient is told of, once; one that no row reaches is not."""

from __future__ import annotations

from flowtrain.runtime.unreached import STEPS, Unreached
from flowtrain.types import Module

ALL = {Module.ENCODER: 0.5, Module.PROJECTOR: 0.5, Module.BACKBONE: 0.5}


def test_a_gradient_that_stays_zero_is_told_once() -> None:
    unreached = Unreached(Module)
    cut_off = {**ALL, Module.ENCODER: 0.0}
    told = [unreached.saw(cut_off, has_images=True) for _ in range(3 * STEPS)]
    assert told[STEPS - 1] == [Module.ENCODER]
    assert not any(told[: STEPS - 1])
    assert not any(told[STEPS:])


def test_steps_without_images_say_nothing_of_the_encoder() -> None:
    unreached = Unreached(Module)
    without = {Module.BACKBONE: 0.5}
    for _ in range(2 * STEPS):
        assert unreached.saw(without, has_images=False) == []
    for _ in range(STEPS - 1):
        assert unreached.saw(without, has_images=True) == []
    assert unreached.saw(ALL, has_images=True) == [], "a gradient begins the count again"
    told = [unreached.saw(without, has_images=True) for _ in range(STEPS)]
    assert told[-1] == [Module.ENCODER, Module.PROJECTOR]


def test_frozen_modules_need_none() -> None:
    unreached = Unreached([Module.PROJECTOR])
    assert not any(unreached.saw({Module.PROJECTOR: 1.0}, has_images=True) for _ in range(2 * STEPS))
