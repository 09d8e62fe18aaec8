import math

import pytest

from flowtrain.messages import PackTrained, ReduceReport, UpdateReport
from flowtrain.runtime.step_end import StepEnd
from flowtrain.types import Module, Pack, Phase, Role, Step

RANKS = frozenset({(Role.PRODUCER, 0), (Role.CONSUMER, 0), (Role.CONSUMER, 1)})


def two_packs() -> Step:
    slots = (tuple(Pack(0, rank, (), (), 0.0, 0.0) for rank in range(2)),)
    return Step(Phase.TRAIN, 7, slots, rows=4, epoch=0, state={"cursor": 4})


def filled(losses: tuple[float, float] = (6.0, 4.0), **options: object) -> StepEnd:
    end = StepEnd(two_packs(), RANKS, clip_norm=1.0, **options)  # type: ignore[arg-type]
    for rank, loss in enumerate(losses):
        end.trained(PackTrained(Phase.TRAIN, 7, 0, rank, loss, 5, 0.0, 0.0))
    end.reduced(Role.PRODUCER, 0, ReduceReport(7, {Module.ENCODER: 900.0, Module.PROJECTOR: 1600.0}))
    for rank in range(2):
        end.reduced(Role.CONSUMER, rank, ReduceReport(7, {Module.BACKBONE: 7500.0}))
    return end


def test_one_norm_over_both_sides_divided_once_by_trained_tokens() -> None:
    end = filled()
    result = end.result()
    assert (result.loss, result.trained_tokens) == (1.0, 10)
    assert result.module_norm(Module.ENCODER) == pytest.approx(3.0)
    assert result.grad_norm == pytest.approx(10.0)
    order = end.order(result, {Module.BACKBONE: 0.1}, None)
    assert order.scale == 0.1
    assert order.clip == pytest.approx(0.1, rel=1e-5)
    assert order.apply


def test_ready_needs_every_pack_and_every_report_and_done_every_update() -> None:
    end = StepEnd(two_packs(), RANKS, None)
    assert not end.ready
    end = filled()
    assert end.ready
    assert not end.done
    for role, rank in RANKS:
        end.updated(role, rank, UpdateReport(7, 0))
    assert end.done


def test_step_without_a_trained_token_makes_no_update() -> None:
    end = StepEnd(two_packs(), RANKS, 1.0)
    for rank in range(2):
        end.trained(PackTrained(Phase.TRAIN, 7, 0, rank, 0.0, 0, 0.0, 0.0))
    for role, rank in RANKS:
        end.reduced(role, rank, ReduceReport(7, {}))
    result = end.result()
    assert not result.applied
    assert result.finite
    assert not end.order(result, {}, None).apply


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_is_left_out(bad: float) -> None:
    result = filled((bad, 1.0)).result()
    assert not result.finite
    assert not result.applied


def test_ranks_of_a_side_that_disagree_are_our_bug() -> None:
    end = filled()
    end.reduced(Role.CONSUMER, 1, ReduceReport(7, {Module.BACKBONE: 7500.1}))
    with pytest.raises(AssertionError, match="disagree"):
        end.result()


def test_planted_denominator_changes_loss_and_norm() -> None:
    plain, planted = filled().result(), filled(denominator_offset=1).result()
    assert planted.loss == pytest.approx(plain.loss * 10 / 11)
    assert planted.grad_norm == pytest.approx(plain.grad_norm * 10 / 11)
