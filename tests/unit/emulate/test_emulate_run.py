"""Emulated runs in this process: the runtime's own loop, pool and books, with stages that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from flowtrain.config.modes import ModeName
from flowtrain.emulate.case import Variant
from flowtrain.emulate.emulation import Emulation
from flowtrain.emulate.meter import Meter
from flowtrain.emulate.run import packs_of
from flowtrain.emulate.slot import make_slot
from flowtrain.emulate.stages import check_bytes, feature_value
from flowtrain.plan import RankPlan
from flowtrain.runtime.local import LocalExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest


class OneThread(LocalExecutor):
    """All devices in turn."""

    def start(self, ranks: Sequence[RankPlan]) -> None:
        for plan in ranks:
            self._slots[plan.role, plan.rank] = make_slot(plan.role)


def run(made: Any) -> Meter:
    made.config.run.dir.mkdir()
    made.emulation.write(made.config.run.dir)
    meter = Meter(OneThread(), sizes=True)
    try:
        plan = made.emulation.plan(made.config)
        shape = made.emulation.shape
        execute(made.config, made.config.run.dir, None, StopRequest(9), executor=meter, shape=shape, plan=plan)
    finally:
        meter.close()
    return meter


@pytest.mark.parametrize(("mode", "frozen"), [("flow", True), ("flow", False), ("monolithic", False)])
def test_packs_are_those_of_the_model(make: Callable[..., Any], mode: ModeName, frozen: bool) -> None:
    made = make(Variant.of_mode(mode), frozen)
    run(made)
    composed = [
        {"step": step.index, "ids": [sample.id for sample in pack.samples]}
        for step in islice(made.modelled.steps(), 3)
        for pack in step.packs
    ]
    trained = [{"step": pack["step"], "ids": pack["ids"]} for pack in packs_of(made.config.run.dir)]
    assert trained == composed


def test_no_call_is_made_for_a_sample(make: Callable[..., Any]) -> None:
    made = make(Variant.of_mode("flow"), frozen=False)
    meter = run(made)
    packs = packs_of(made.config.run.dir)
    samples = sum(len(pack["ids"]) for pack in packs)
    work = meter.calls["train"] + meter.calls["encode"] + meter.calls["backward"]
    assert work <= 3 * len(packs) < samples
    assert meter.calls["reduce"] == meter.calls["update"] == 3 * 4
    assert meter.calls["read"] < samples / 10
    assert meter.order_bytes["train"] > 0
    assert meter.answer_bytes["read"] > 0
    assert meter.busy_seconds > 0


def test_a_byte_of_another_row_is_told() -> None:
    block = np.full(64, feature_value(5), np.uint8)
    check_bytes([block], feature_value(5), "the features of position 5")
    block[63] = feature_value(6)
    with pytest.raises(AssertionError, match="the features of position 5 are bytes from 6 to 7, expected 6"):
        check_bytes([block], feature_value(5), "the features of position 5")
    assert feature_value(5) != feature_value(6) != 255 - feature_value(6)


def test_a_file_says_what_is_emulated(make: Callable[..., Any]) -> None:
    made = make(Variant.of_mode("flow"), byte_scale=1 / 32)
    made.config.run.dir.mkdir()
    made.emulation.write(made.config.run.dir)
    assert Emulation.read(made.config.run.dir) == made.emulation
    assert [spec.width for spec in made.emulation.shape.features(made.config.cut)] == [3584 // 32]
