"""Composition as a whole: its invariants for any rows, policy and spec, and resume from any step."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_rows import COST, SPEC, Row, assert_invariants, compose, row_lists, sample, specs

from flowtrain.packing import POLICIES, Composer, CompositionSpec, CostModel, compose_eval
from flowtrain.types import Phase, SampleMeta, Step


@settings(max_examples=80, deadline=None)
@given(specs, row_lists())
def test_invariants(spec: CompositionSpec, rows: list[Row]) -> None:
    assert_invariants(spec, rows, compose(Composer(spec, COST), rows))


@settings(max_examples=50, deadline=None)
@given(specs, row_lists())
def test_when_rows_arrive_changes_nothing(spec: CompositionSpec, rows: list[Row]) -> None:
    assert compose(Composer(spec, COST), rows) == compose(Composer(spec, COST), rows, eager=True)


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.integers(2, 4))
def test_producers_change_only_who_encodes(spec: CompositionSpec, rows: list[Row], num_producers: int) -> None:
    def without_producers(steps: list[Step]) -> list:
        return [
            (step.state, [(p.slot, p.rank, p.samples, [(u.id, u.samples) for u in p.units])])
            for step in steps
            for p in step.packs
        ]

    many = replace(spec, num_producers=num_producers)
    steps = compose(Composer(many, COST), rows)
    assert_invariants(many, rows, steps)
    assert without_producers(steps) == without_producers(compose(Composer(spec, COST), rows))


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.integers(1, 2), st.integers(2, 3))
def test_producers_that_encode_together_have_as_many_units_of_a_slot(
    spec: CompositionSpec, rows: list[Row], groups: int, shards: int
) -> None:
    """Frozen encoder or not; packs and units are those of one producer, and no more zero-weight units than needed."""
    together = replace(spec, num_producers=groups * shards, producer_shards=shards)
    steps, alone = compose(Composer(together, COST), rows), compose(Composer(spec, COST), rows)
    for step, plain in zip(steps, alone, strict=True):
        for slot, plain_slot in zip(step.slots, plain.slots, strict=True):
            counts = [0] * together.num_producers
            real = list(counts)
            for unit in (unit for pack in slot for unit in pack.units):
                assert unit.producer is not None
                counts[unit.producer] += 1
                real[unit.producer] += bool(unit.samples)
            for first in range(0, len(counts), shards):
                assert set(counts[first : first + shards]) == {max(real[first : first + shards])}
            assert max(real) - min(real) <= 1
            for pack, plain_pack in zip(slot, plain_slot, strict=True):
                assert [u.samples for u in pack.units if u.samples] == [u.samples for u in plain_pack.units]
                assert (pack.samples, pack.cost) == (plain_pack.samples, plain_pack.cost)
                assert len({unit.id for unit in pack.units}) == len(pack.units)


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.booleans())
def test_colocated_ranks_encode_their_own_packs(spec: CompositionSpec, rows: list[Row], trainable: bool) -> None:
    """Frozen encoder or not; packs and units are those of any other run."""
    plain = replace(spec, trainable_encoder=trainable)
    together = replace(plain, num_producers=spec.num_consumers, colocated=True)
    steps, apart = compose(Composer(together, COST), rows), compose(Composer(plain, COST), rows)
    for step, other in zip(steps, apart, strict=True):
        for pack, its in zip(step.packs, other.packs, strict=True):
            assert {unit.producer for unit in pack.units} <= {pack.rank}
            assert (pack.samples, [u.samples for u in pack.units]) == (its.samples, [u.samples for u in its.units])


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.data())
def test_resume_from_any_step(spec: CompositionSpec, rows: list[Row], data: st.DataObject) -> None:
    steps = compose(Composer(spec, COST), rows)
    if not steps:
        return
    at = data.draw(st.sampled_from(steps))
    left = [rows[position] for position in at.state["carried"]] + list(rows[at.cursor :])
    resumed = Composer(spec, COST)
    resumed.load_state_dict(json.loads(json.dumps(at.state)))
    assert compose(resumed, left) == steps[at.index :]


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"wlb"}))  # which keeps long rows back
def test_lookahead_of_one_takes_the_next_rows(policy: str) -> None:
    rows: list[Row] = [sample(p, 1 + 7 * p % 30, [1] * (p % 3)) for p in range(24)]
    steps = compose(Composer(replace(SPEC, policy=policy), COST), rows)
    assert [sorted(s.position for s in step.samples) for step in steps] == [
        list(range(start, start + 6)) for start in range(0, 24, 6)
    ]


def test_arrival_closes_a_pack_when_the_next_row_does_not_fit() -> None:
    rows: list[Row] = [sample(p, tokens, []) for p, tokens in enumerate([40, 20, 10, 60, 1, 1])]
    (step,) = compose(Composer(replace(SPEC, policy="arrival"), COST), rows)
    assert [[s.position for s in pack.samples] for pack in step.packs] == [[0, 1], [2], [3, 4, 5], []]


@pytest.mark.parametrize(
    ("trainable", "text_first"), [(False, [True, True, False, False]), (True, [True, False, False, True])]
)
def test_text_hides_the_start_of_encoding_and_the_end_of_its_backward(trainable: bool, text_first: list[bool]) -> None:
    rows: list[Row] = [sample(0, 10, [6] * 5), sample(1, 60, []), sample(2, 10, [6] * 5), sample(3, 60, [])]
    spec = replace(SPEC, step_samples=4, num_consumers=1, max_pack_vision_bytes=10**6, trainable_encoder=trainable)
    (step,) = compose(Composer(spec, COST), rows)
    assert [pack.encode_cost == 0 for pack in step.packs] == text_first


def test_dynamic_packs_are_close_to_equal() -> None:
    """Lengths with a long tail: within 5 % of equal, where the order of arrival is far from it."""
    rows: list[Row] = [sample(p, 4 + (p * p * 7919) % 29, [1 + p % 5] * (p % 3)) for p in range(192)]
    spec = replace(SPEC, step_samples=64, num_consumers=4, max_tokens=160, max_pack_vision_bytes=10**6)

    def imbalance(policy: str) -> float:
        steps = compose(Composer(replace(spec, policy=policy), COST), rows)
        met = sum(max(pack.cost for pack in slot) for step in steps for slot in step.slots)
        return 4 * met / sum(pack.cost for step in steps for pack in step.packs)

    assert imbalance("dynamic") <= 1.05
    assert imbalance("arrival") >= 1.15


def test_horizon_ends_the_rows_without_being_told() -> None:
    spec = replace(SPEC, horizon=8)
    composer = Composer(spec, COST)
    for position in range(8):
        composer.add([sample(position, 5, [])])
    first, second = composer.next(), composer.next()
    assert first is not None
    assert second is not None
    assert (first.rows, second.rows, second.cursor, composer.wants(), composer.next()) == (6, 2, 8, 0, None)


def test_epoch_follows_the_last_row() -> None:
    rows: list[Row] = [sample(p, 5, []) for p in range(12)]
    steps = compose(Composer(replace(SPEC, num_rows=6), COST), rows)
    assert [step.epoch for step in steps] == [0, 1]


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(skipped=False))
def test_evaluation_has_every_row_once(spec: CompositionSpec, rows: list[SampleMeta]) -> None:
    step = compose_eval(spec, COST, rows, index=7)
    assert (step.phase, step.index, step.rows) == (Phase.EVAL, 7, len(rows))
    assert sorted(s.position for s in step.samples) == list(range(len(rows)))
    assert all(len(slot) == spec.num_consumers for slot in step.slots)
    assert all(pack.tokens <= spec.max_tokens for pack in step.packs)


def test_many_rows_are_composed_in_little_time() -> None:
    """Fat packs of many short rows: an evaluation pass is composed between two steps and must not hold them up."""
    rows = [sample(p, 4 + (p * p * 7919) % 29, [1 + p % 5] * (p % 3)) for p in range(4000)]
    spec = replace(SPEC, num_consumers=2, max_tokens=2048, max_pack_vision_bytes=10**7)
    before = time.process_time()
    step = compose_eval(spec, COST, rows, 1)
    assert time.process_time() - before < 5.0
    costs = [pack.cost for pack in step.packs]
    assert max(costs) <= 1.02 * sum(costs) / len(costs)


def test_evaluation_without_rows_is_empty() -> None:
    assert compose_eval(SPEC, COST, [], 1).slots == ()


def test_too_big_rows_are_told_with_both_numbers() -> None:
    composer = Composer(SPEC, COST)
    (told,) = composer.add([sample(0, 5, [6]), sample(1, 5, [40])])
    assert (told.position, told.reason) == (1, "too-many-image-bytes")
    assert "2624" in told.detail
    assert "2048" in told.detail


@pytest.mark.parametrize(
    ("caps", "reason", "told"),
    [
        ({"max_patches": 8}, "too-many-patches", "24 patches and a pack may have 8: raise packing.max_patches"),
        ({"max_images": 1}, "too-many-images", "2 images and a pack may have 1: raise packing.max_images"),
        (
            {"max_trained_tokens": 2, "own_pack": True, "max_tokens": 8},
            "too-many-trained",
            "3 trained tokens and a pack may have 2: raise packing.max_trained_tokens",
        ),
    ],
)
def test_rows_over_a_cap_are_told(caps: dict[str, int], reason: str, told: str) -> None:
    rows = [sample(0, 5, []), sample(1, 5, [2, 4])._replace(trained_tokens=3)]
    (skipped,) = Composer(replace(SPEC, **caps), COST).add(rows)
    assert (skipped.position, skipped.reason, skipped.detail) == (1, reason, f"it has {told}")


def test_rows_out_of_order_are_our_bug() -> None:
    composer = Composer(SPEC, COST)
    composer.add([sample(0, 5, [])])
    with pytest.raises(AssertionError, match="position 2 came where 1 was due"):
        composer.add([sample(2, 5, [])])


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.integers(0, 5), st.booleans())
def test_a_new_cost_holds_from_its_step_whenever_rows_came(
    spec: CompositionSpec, rows: list[Row], at: int, eager: bool
) -> None:
    dearer = CostModel.from_coefficients(token=1.0, token_pair=0.5, patch=1.0)

    def with_change(eager: bool) -> list[Step]:
        composer, steps, waiting = Composer(spec, COST), [], list(rows)
        while True:
            while waiting and (eager or composer.wants()):
                composer.add([waiting.pop(0)])
            if not waiting:
                composer.end()
            composer.cost = dearer if len(steps) >= at else COST
            step = composer.next()
            if step is not None:
                steps.append(step)
            elif not waiting:
                return steps

    steps = with_change(eager)
    assert steps == with_change(not eager)
    for step in steps:
        cost = dearer if step.index > at else COST
        assert all(pack.cost == cost.pack_cost(pack.samples) for pack in step.packs)
