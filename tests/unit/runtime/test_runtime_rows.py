"""Rows from readers to steps: any order of arrival, payloads kept as long as needed, every skipped row told once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data.reader import BlockRead
from flowtrain.data.stream import SampleStream
from flowtrain.errors import DataError
from flowtrain.packing import Composer, CompositionSpec, CostModel, compose_eval
from flowtrain.runtime.rows import PROBED_ROWS, BadShare, EvalRows, Payloads, RowFeed
from flowtrain.types import ImageMeta, Phase, SampleMeta, SkippedRow, Step

COST = CostModel.from_coefficients(token=100.0, token_pair=1.0, trained_token=10.0, patch=20.0, patch_pair=0.5)
BLOCK_ROWS = 4
MOST_VISION = 12
"""Vision tokens of a pack that the pool has room for."""


def spec_of(num_rows: int, step_samples: int, lookahead: int) -> CompositionSpec:
    return CompositionSpec(
        num_rows=num_rows,
        step_samples=step_samples,
        step_packs=None,
        policy="dynamic",
        max_tokens=64,
        lookahead=lookahead,
        num_consumers=2,
        num_producers=1,
        trainable_encoder=False,
        max_unit_patches=40,
        max_pack_vision_bytes=64 * MOST_VISION,
        horizon=num_rows,
        block_bytes=lambda tokens, patches: 64 * tokens,
    )


def row_at(position: int, kind: str, block: int, index: int) -> SampleMeta | SkippedRow:
    if kind == "bad":
        return SkippedRow(position, position, f"row-{position}", "template", "")
    vision = {"text": 0, "image": 3, "too-big": MOST_VISION + 1}[kind]
    images = (ImageMeta(8, 8, vision, 4 * vision, 16 * vision**2),) if vision else ()
    return SampleMeta.of(position, position, f"row-{position}", 5 + position % 7, vision, 1, images, block, index)


def read(kinds: list[str], start: int, count: int, block: int, phase: Phase = Phase.TRAIN) -> BlockRead:
    rows: list[SampleMeta | SkippedRow] = []
    for position in range(start, start + count):
        index = sum(isinstance(row, SampleMeta) for row in rows)
        rows.append(row_at(position, kinds[position], block, index))
    return BlockRead(phase, block, start, tuple(rows))


def run(kinds: list[str], step_samples: int, lookahead: int, seed: int) -> tuple[list[Step], list[SkippedRow]]:
    """All steps of one epoch, blocks arriving in an order that the dice choose; checks payloads on the way."""
    dice = random.Random(seed)
    payloads = Payloads()
    stream = SampleStream(len(kinds), BLOCK_ROWS, num_readers=2, end=len(kinds))
    composer = Composer(spec_of(len(kinds), step_samples, lookahead), COST)
    feed = RowFeed(stream, composer, payloads, BadShare(1.0, len(kinds)))
    steps: list[Step] = []
    told: list[SkippedRow] = []
    asked: list[BlockRead] = []
    while True:
        asked += [read(kinds, request.start, request.count, request.block) for request in feed.requests()]
        step = feed.next_step()
        if step is not None:
            steps.append(step)
            told += feed.skipped_before(step)
            blocks = sorted({sample.block for sample in step.samples})
            assert payloads.handles(blocks) == [f"payload {block}" for block in blocks]
            payloads.done(step.samples)
        elif asked:
            block = asked.pop(dice.randrange(len(asked)))
            feed.add(block, f"payload {block.block}")
        elif feed.exhausted:
            break
        else:
            raise AssertionError("no step, nothing asked for, and rows are left")
    assert len(payloads) == 0, "payloads outlive the last sample that needs them"
    return steps, told + feed.skipped_rest()


@given(
    kinds=st.lists(st.sampled_from(["text", "image", "image", "bad", "too-big"]), min_size=1, max_size=40),
    step_samples=st.integers(1, 6),
    lookahead=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_row_is_trained_or_told_as_skipped_once_whatever_arrives_first(
    kinds: list[str], step_samples: int, lookahead: int, seed: int
) -> None:
    if not {"text", "image"} & set(kinds):
        with pytest.raises(DataError, match=rf"none of the {len(kinds)} rows can be used"):
            run(kinds, step_samples, lookahead, seed)
        return
    steps, skipped = run(kinds, step_samples, lookahead, seed)
    trained = Counter(sample.position for step in steps for sample in step.samples)
    assert trained == Counter(position for position, kind in enumerate(kinds) if kind in ("text", "image"))
    reasons = {"bad": "template", "too-big": "too-many-image-bytes"}
    expected = {position: reasons[kind] for position, kind in enumerate(kinds) if kind in reasons}
    assert {row.position: row.reason for row in skipped} == expected
    assert len(skipped) == len(expected)
    assert steps == run(kinds, step_samples, lookahead, seed=0)[0]


@pytest.mark.parametrize(("num_bad", "stops"), [(50, False), (51, True)])
def test_a_run_over_mostly_bad_rows_is_stopped_with_the_commonest_reason(num_bad: int, stops: bool) -> None:
    share = BadShare(0.5, num_rows=1000)

    def show() -> None:
        rows = [
            row_at(position, "text" if num_bad <= position < PROBED_ROWS else "bad", 0, 0)
            for position in range(2 * PROBED_ROWS)
        ]
        for start in range(0, len(rows), 64):
            share.add(rows[start : start + 64])

    if not stops:
        show()
        return
    with pytest.raises(DataError, match=r"51 of the first 100 rows .* 51 of them for `template` \(first: row row-0"):
        show()


def test_images_that_cannot_be_decoded_count_among_the_first_rows() -> None:
    share = BadShare(0.5, num_rows=40)
    bad = [SkippedRow(position, position, f"row-{position}", "image-undecodable", "cut") for position in range(40)]
    share.add([row_at(position, "bad" if position < 8 else "image", 0, 0) for position in range(40)])
    share.decoded(16, bad[:12])
    with pytest.raises(
        DataError, match=r"21 of the first 40 rows .* 13 of them for `image-undecodable` \(first: row row-0"
    ):
        share.decoded(16, bad[:1])


def test_a_run_that_trained_no_row_says_so_at_its_end_whatever_share_may_be_bad() -> None:
    bad = [SkippedRow(position, position, f"row-{position}", "image-undecodable", "cut") for position in range(8)]
    share = BadShare(1.0, num_rows=40)
    share.decoded(4, bad[:4])
    share.decoded(4, bad[4:])
    with pytest.raises(DataError, match=r"none of the 8 rows of the run could be trained, 8 of them"):
        share.ended()
    share.decoded(4, bad[:3])
    share.ended()


def test_held_out_rows_are_ready_when_all_have_come_in_source_order() -> None:
    """A row that no pack can hold is told, as one of training is: composing it would never end."""
    kinds = ["text", "bad", "image", "text", "too-big", "bad"]
    payloads = Payloads()
    composer = Composer(spec_of(len(kinds), step_samples=2, lookahead=1), COST)
    rows = EvalRows(len(kinds), BLOCK_ROWS, 1, payloads, composer.too_big)
    reads = [read(kinds, asked.start, asked.count, asked.block, Phase.EVAL) for asked in rows.requests()]
    for block in reversed(reads):
        assert not rows.ready
        rows.add(block, "payload")
    assert rows.ready
    assert [sample.position for sample in rows.samples] == [0, 2, 3]
    assert [(row.position, row.reason) for row in rows.skipped][1:] == [(4, "too-many-image-bytes"), (5, "template")]
    assert compose_eval(composer.spec, COST, rows.samples, 1).rows == 3
    assert len(payloads) == 1
    assert list(rows.requests()) == []
