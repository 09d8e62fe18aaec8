"""Composition as a whole: its invariants for any rows, policy and spec, and resume from any step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.packing import Composer, CompositionSpec, CostModel, compose_eval
from flowtrain.types import ImageMeta, Phase, SampleMeta, SkippedRow, Step

Row = SampleMeta | SkippedRow

COST = CostModel.from_coefficients(token=100.0, token_pair=1.0, trained_token=10.0, patch=20.0, patch_pair=0.5)
MAX_TOKENS = 64


def block_bytes(sample: SampleMeta) -> int:
    return 64 + 64 * sample.vision_tokens


SPEC = CompositionSpec(
    num_rows=40,
    step_samples=6,
    step_packs=None,
    policy="dynamic",
    max_tokens=MAX_TOKENS,
    lookahead=1,
    num_consumers=2,
    num_producers=1,
    trainable_encoder=True,
    max_unit_patches=40,
    max_pack_vision_bytes=2048,
    horizon=None,
    block_bytes=block_bytes,
)


def sample(position: int, text: int, images: Sequence[int]) -> SampleMeta:
    metas = tuple(ImageMeta(8, 8, tokens, 4 * tokens) for tokens in images)
    return SampleMeta(position, position, f"row-{position}", text, sum(images), 1, metas)


@st.composite
def row_lists(draw: st.DrawFn, skipped: bool = True) -> list[Row]:
    rows: list[Row] = []
    for position in range(draw(st.integers(1, 40))):
        if skipped and draw(st.integers(0, 9)) == 0:
            rows.append(SkippedRow(position, position, f"row-{position}", "too-long", ""))
        else:
            images = draw(st.lists(st.integers(1, 6), max_size=4))
            rows.append(sample(position, draw(st.integers(1, MAX_TOKENS - 24)), images))
    return rows


specs = st.builds(
    lambda policy, lookahead, consumers, packs, trainable: replace(
        SPEC,
        policy=policy,
        lookahead=lookahead,
        num_consumers=consumers,
        step_packs=packs,
        step_samples=6 if packs is None else None,
        trainable_encoder=trainable,
    ),
    st.sampled_from(["dynamic", "arrival"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, None, 1, 2]),
    st.booleans(),
)


def compose(composer: Composer, rows: Sequence[Row], eager: bool = False) -> list[Step]:
    """All steps of these rows; `eager` adds all rows at once, otherwise only as many as are wanted."""
    steps, waiting = [], list(rows)
    while True:
        while waiting and (eager or composer.wants()):
            composer.add(waiting.pop(0))
        if not waiting:
            composer.end()
        step = composer.next()
        if step is not None:
            steps.append(step)
        elif not waiting:
            return steps


def assert_invariants(spec: CompositionSpec, rows: Sequence[Row], steps: Sequence[Step]) -> None:
    trained = [taken.position for step in steps for taken in step.samples]
    assert sorted(trained) == [row.position for row in rows if isinstance(row, SampleMeta)], "each row exactly once"
    for number, step in enumerate(steps, start=1):
        assert step.index == number
        assert step.rows == len(step.samples) > 0
        if spec.step_samples is not None:
            assert step.rows == spec.step_samples or number == len(steps)
        else:
            assert len(step.slots) == spec.step_packs
        loads = [0] * spec.num_producers
        for k, slot in enumerate(step.slots):
            assert [(pack.slot, pack.rank) for pack in slot] == [(k, rank) for rank in range(spec.num_consumers)]
            for pack in slot:
                assert pack.tokens <= spec.max_tokens
                assert sum(spec.vision_bytes(s) for s in pack.samples) <= spec.max_pack_vision_bytes
                assert pack.cost == spec_cost(pack.samples)
                assert_units(spec, pack.samples, pack.units, loads)


def spec_cost(samples: Sequence[SampleMeta]) -> int:
    return sum(COST.sample_cost(s) for s in samples)


def assert_units(spec: CompositionSpec, samples: Sequence[SampleMeta], units: Sequence, loads: list[int]) -> None:
    assert [s for unit in units for s in unit.samples] == [s for s in samples if s.images]
    for number, unit in enumerate(units):
        assert unit.id.number == number
        assert unit.patches <= spec.max_unit_patches or len(unit.samples) == 1
        assert unit.bytes == sum(block_bytes(s) for s in unit.samples)
        assert (unit.producer is not None) == spec.trainable_encoder
        if unit.producer is not None:
            assert loads[unit.producer] == min(loads), "the least loaded producer takes the next unit"
            loads[unit.producer] += COST.encode_cost(unit.samples)


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
            (step.cursor, step.carried, [(p.slot, p.rank, p.samples, [(u.id, u.samples) for u in p.units])])
            for step in steps
            for p in step.packs
        ]

    many = replace(spec, num_producers=num_producers)
    steps = compose(Composer(many, COST), rows)
    assert_invariants(many, rows, steps)
    assert without_producers(steps) == without_producers(compose(Composer(spec, COST), rows))


@settings(max_examples=50, deadline=None)
@given(specs, row_lists(), st.data())
def test_resume_from_any_step(spec: CompositionSpec, rows: list[Row], data: st.DataObject) -> None:
    steps = compose(Composer(spec, COST), rows)
    if not steps:
        return
    at = data.draw(st.sampled_from(steps))
    left = [rows[position] for position in at.carried] + list(rows[at.cursor :])
    resumed = Composer(spec, COST, cursor=at.cursor, carried=at.carried, step=at.index)
    assert compose(resumed, left) == steps[at.index :]


@settings(max_examples=50, deadline=None)
@given(row_lists(skipped=False), st.integers(1, 4))
@example([sample(p, 9 if p == 11 else 1, [1] * (p > 1)) for p in range(37)], 4)
def test_no_row_waits_longer_than_promised(rows: list[Row], lookahead: int) -> None:
    spec = replace(SPEC, lookahead=lookahead)
    for step in compose(Composer(spec, COST), rows):
        for taken in step.samples:
            turn = taken.position // 6 + 1
            assert step.index <= turn + lookahead - (lookahead == 1)


@pytest.mark.parametrize("policy", ["dynamic", "arrival"])
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


def test_text_heavy_slots_come_first() -> None:
    rows: list[Row] = [sample(0, 10, [6] * 5), sample(1, 60, []), sample(2, 10, [6] * 5), sample(3, 60, [])]
    spec = replace(SPEC, step_samples=4, num_consumers=1, max_pack_vision_bytes=10**6)
    (step,) = compose(Composer(spec, COST), rows)
    encode = [pack.encode_cost for pack in step.packs]
    assert encode == sorted(encode)
    assert encode[0] == 0 < encode[-1]


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
        composer.add(sample(position, 5, []))
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
    assert composer.too_big(sample(0, 5, [6])) == ""
    told = composer.too_big(sample(0, 5, [40]))
    assert "2624" in told
    assert "2048" in told


def test_rows_out_of_order_are_our_bug() -> None:
    composer = Composer(SPEC, COST)
    composer.add(sample(0, 5, []))
    with pytest.raises(AssertionError, match="position 2 came where 1 was due"):
        composer.add(sample(2, 5, []))
