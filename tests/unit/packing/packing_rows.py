"""Rows, specs and the invariants of composition for the tests of packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from flowtrain.packing import POLICIES, Composer, CompositionSpec, CostModel
from flowtrain.packing.measure import row_waits
from flowtrain.types import EncodeUnit, ImageMeta, SampleMeta, SkippedRow, Step

Row = SampleMeta | SkippedRow

COST = CostModel.from_coefficients(token=100.0, token_pair=1.0, trained_token=10.0, patch=20.0, patch_pair=0.5)
MAX_TOKENS = 64


def block_bytes(tokens: int, patches: int) -> int:
    return 64 + 64 * tokens


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
    metas = tuple(ImageMeta(8, 8, tokens, 4 * tokens, 16 * tokens**2) for tokens in images)
    return SampleMeta.of(position, position, f"row-{position}", text, sum(images), 1, metas)


@st.composite
def row_lists(draw: st.DrawFn, skipped: bool = True, largest: int = MAX_TOKENS - 24) -> list[Row]:
    """Rows with up to four images; lengths of one of several shapes."""
    shape = draw(st.sampled_from(["uniform", "two sizes", "just over half", "constant"]))
    constant = draw(st.integers(1, largest))
    rows: list[Row] = []
    for position in range(draw(st.integers(1, 40))):
        if skipped and draw(st.integers(0, 9)) == 0:
            rows.append(SkippedRow(position, position, f"row-{position}", "too-long", ""))
            continue
        images = draw(st.lists(st.integers(1, 6), max_size=4))
        text = {
            "uniform": draw(st.integers(1, largest)),
            "two sizes": largest if draw(st.integers(0, 9)) == 0 else 2,
            "just over half": MAX_TOKENS // 2 + 1,
            "constant": constant,
        }[shape]
        rows.append(sample(position, text, images))
    return rows


specs = st.builds(
    lambda policy, lookahead, consumers, packs, trainable, sync, caps: replace(
        SPEC,
        policy=policy,
        lookahead=lookahead,
        num_consumers=consumers,
        step_packs=packs,
        step_samples=6 if packs is None else None,
        trainable_encoder=trainable,
        sync=sync,
        max_patches=96 if caps else None,
        max_images=5 if caps else None,
        max_trained_tokens=6 if caps else None,
    ),
    st.sampled_from([*POLICIES, "dynamic", "dynamic"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, None, 1, 2]),
    st.booleans(),
    st.sampled_from(["step", "microbatch", "beat"]),
    st.booleans(),
)


def compose(composer: Composer, rows: Sequence[Row], eager: bool = False) -> list[Step]:
    """All steps of these rows; `eager` adds all rows at once, otherwise only as many as are wanted."""
    steps, waiting = [], list(rows)
    while True:
        while waiting and (eager or composer.wants()):
            composer.add([waiting.pop(0)])
        if not waiting:
            composer.end()
        step = composer.next()
        if step is not None:
            steps.append(step)
        elif not waiting:
            return steps


def assert_invariants(spec: CompositionSpec, rows: Sequence[Row], steps: Sequence[Step]) -> None:
    """What holds for the steps of any rows, spec and policy."""
    trained = [taken.position for step in steps for taken in step.samples]
    assert sorted(trained) == [row.position for row in rows if isinstance(row, SampleMeta)], "each row exactly once"
    for number, step in enumerate(steps, start=1):
        assert step.index == number
        assert step.rows == len(step.samples) > 0
        if spec.step_samples is not None:
            assert step.rows == spec.step_samples or number == len(steps)
        else:
            assert len(step.slots) == spec.step_packs
        for k, slot in enumerate(step.slots):
            assert [(pack.slot, pack.rank) for pack in slot] == [(k, rank) for rank in range(spec.num_consumers)]
            for pack in slot:
                assert pack.tokens <= spec.max_tokens or (spec.own_pack and len(pack.samples) == 1)
                assert sum(spec.vision_bytes(s) for s in pack.samples) <= spec.max_pack_vision_bytes
                assert spec.max_patches is None or sum(s.patches for s in pack.samples) <= spec.max_patches
                assert spec.max_images is None or sum(len(s.images) for s in pack.samples) <= spec.max_images
                trained = sum(s.trained_tokens for s in pack.samples)
                assert spec.max_trained_tokens is None or trained <= spec.max_trained_tokens
                assert pack.cost == COST.pack_cost(pack.samples)
                assert pack.encode_cost == COST.encode_cost(pack.samples)
                assert_units(spec, pack.samples, pack.units)
    assert_waits(spec, steps)


def assert_units(spec: CompositionSpec, samples: Sequence[SampleMeta], units: Sequence[EncodeUnit]) -> None:
    """Units hold the samples with images, whole and in order."""
    assert [s for unit in units for s in unit.samples] == [s for s in samples if s.images]
    for number, unit in enumerate(units):
        assert unit.id.number == number
        assert unit.patches <= spec.max_unit_patches or len(unit.samples) == 1
        assert unit.bytes == sum(spec.vision_bytes(s) for s in unit.samples)
        assert (unit.producer is not None) == spec.trainable_encoder


def assert_waits(spec: CompositionSpec, steps: Sequence[Step]) -> None:
    """The promise on waiting; what entered the window is told by the steps' cursors."""
    if POLICIES[spec.policy].bounded and steps:
        assert max(row_waits(steps)) <= spec.longest_wait(heavy=True)
        taken = [sample for step in steps for sample in step.samples]
        most = COST.length_cost(spec.max_tokens // 8) * 8
        waits = zip(row_waits(steps), taken, strict=True)
        ordinary = [wait for wait, sample in waits if COST.length_cost(sample.tokens) <= most]
        assert max(ordinary, default=0) <= spec.longest_wait(heavy=False)
