"""The cost model: whole numbers that differ from the real formula by less than a millionth, and their log entry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.config.schema import PackingConfig
from flowtrain.flops import encoder_flops, projector_flops, step_flops
from flowtrain.packing import POLICIES, CostModel
from flowtrain.shapes import Mixer, read_shape
from flowtrain.types import Cut, ImageMeta, Module, SampleMeta

PLANS = Path(__file__).parents[3] / "examples/plans"

coefficients = st.fixed_dictionaries(
    {
        "token": st.floats(1e-9, 1e15),
        "token_pair": st.floats(0, 1e12),
        "trained_token": st.floats(0, 1e12),
        "patch": st.floats(0, 1e12),
        "patch_pair": st.floats(0, 1e9),
        "pack": st.floats(0, 1e9),
        "unit": st.floats(0, 1e9),
    }
)


def sample(tokens: int, patches: list[int], trained: int = 3) -> SampleMeta:
    return with_images(tokens, [ImageMeta(8, 8, 1, number, number**2) for number in patches], trained)


def with_images(tokens: int, images: list[ImageMeta], trained: int = 3) -> SampleMeta:
    return SampleMeta.of(0, 0, "row", tokens, 0, min(trained, tokens), tuple(images))


samples = st.lists(
    st.builds(sample, st.integers(1, 100_000), st.lists(st.integers(1, 20_000), max_size=4)), min_size=1, max_size=5
)


@settings(max_examples=200, deadline=None)
@given(coefficients, samples)
def test_whole_numbers_are_within_a_millionth(real: dict[str, float], rows: list[SampleMeta]) -> None:
    cost = CostModel.from_coefficients(**real)
    exact = real["pack"] + sum(
        real["token"] * s.tokens + real["token_pair"] * s.tokens**2 + real["trained_token"] * s.trained_tokens
        for s in rows
    )
    # What is far below one token is resolved to a millionth of a token.
    resolved = 2e-6 * real["token"] * (1 + len(rows))
    assert cost.real(cost.pack_cost(rows)) == pytest.approx(exact, rel=2e-6, abs=resolved)
    patches = [image.patches for s in rows for image in s.images]
    exact = sum(real["patch"] * p + real["patch_pair"] * p * p for p in patches)
    assert cost.real(cost.encode_cost(rows)) == pytest.approx(exact, rel=2e-6, abs=2e-6 * real["token"] * len(patches))
    for found in (cost.pack_cost(rows), cost.encode_cost(rows), cost.unit_cost(rows), *map(cost.sample_cost, rows)):
        assert type(found) is int


@settings(max_examples=50, deadline=None)
@given(coefficients, samples, samples)
def test_costs_add(real: dict[str, float], some: list[SampleMeta], more: list[SampleMeta]) -> None:
    cost = CostModel.from_coefficients(**real)
    assert cost.pack_cost([*some, *more]) == cost.pack_cost(some) + cost.pack_cost(more) - cost.fixed
    assert cost.pack_cost([*some, *more]) == cost.pack_cost([*more, *some])
    assert cost.encode_cost([*some, *more]) == cost.encode_cost(some) + cost.encode_cost(more)


@settings(max_examples=100, deadline=None)
@given(coefficients, samples, st.sampled_from([1, 1, 1000, 10**6]), st.sampled_from([0, 512]))
def test_costs_of_many_are_those_of_each(
    real: dict[str, float], rows: list[SampleMeta], longer: int, window: int
) -> None:
    """Bit for bit, also where products of 64 bits are too small."""
    cost = CostModel.from_coefficients(**real, projected_patch=real["patch"] / 3, full_layers=9, windowed_layers=19)
    cost = replace(cost, window_tokens=window)
    rows = [row._replace(text_tokens=longer * row.text_tokens, patches=longer * row.patches) for row in rows]
    lengths, trained, patches, pairs = np.array(
        [(row.tokens, row.trained_tokens, row.patches, row.patch_pairs) for row in rows], np.int64
    ).T
    exact = [cost.sample_cost(row) for row in rows]
    encodes = [cost.encode_cost([row]) for row in rows]
    if max(*exact, *encodes) < 1 << 63:
        assert cost.sample_costs(lengths, trained, patches).tolist() == exact
        assert cost.encode_costs(patches, pairs).tolist() == encodes


def test_nothing_costs_nothing() -> None:
    cost = CostModel.from_coefficients(token=1.0, pack=5.0, unit=7.0)
    assert (cost.pack_cost([]), cost.encode_cost([]), cost.unit_cost([])) == (0, 0, 0)
    assert cost.unit_cost([sample(5, [])]) == 0, "a row without images makes no call"


def test_windows_bound_the_span_of_attention() -> None:
    cost = CostModel.from_coefficients(token=1.0, token_pair=1.0, full_layers=2, windowed_layers=3, window_tokens=16)
    assert cost.token_pairs(10) == 10 * 10 * 5
    assert cost.token_pairs(100) == 2 * 100 * 100 + 3 * (16 * 16 + 2 * 16 * 84)


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("tokens", [500, 30_000])
def test_samples_cost_their_flops(window: int | None, tokens: int) -> None:
    """Also where five of six layers attend within a window, as in Gemma 3."""
    shape = read_shape(PLANS / "qwen3-vl-8b")
    if window is not None:
        mixers = tuple(Mixer.FULL if layer % 6 == 5 else Mixer.WINDOW for layer in range(shape.text.layers))
        shape = replace(shape, text=replace(shape.text, mixers=mixers, window=window))
    cost = CostModel.from_shape(shape, frozenset(), Cut.AFTER_PROJECTOR)
    exact = step_flops(shape, [sample(tokens, [], trained=300)], frozenset()).backbone
    assert cost.real(cost.pack_cost([sample(tokens, [], trained=300)])) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", ["internvl3-8b", "qwen2.5-vl-7b", "qwen3-vl-8b"])
@pytest.mark.parametrize("num_tiles", [1, 3, 13])
def test_images_cost_their_flops(name: str, num_tiles: int) -> None:
    """Tiles, windows and whole images."""
    shape = read_shape(PLANS / name)
    patches = num_tiles * 1024
    cost = CostModel.from_shape(shape, frozenset({Module.ENCODER, Module.PROJECTOR}), Cut.AFTER_PROJECTOR)
    exact = encoder_flops(shape.vision, [patches]) + projector_flops(shape.projector, patches)
    image = ImageMeta(8, 8, 1, patches, shape.vision.attended_pairs(patches))
    assert cost.real(cost.encode_cost([with_images(5, [image])])) == pytest.approx(exact, rel=1e-6)


def test_the_reference_has_the_published_share_of_attention() -> None:
    cost = CostModel.reference()
    assert cost.token_pair / cost.token == pytest.approx(2.05e-5, rel=5e-3)


@settings(max_examples=50, deadline=None)
@given(coefficients)
def test_the_log_gives_back_the_same_model(real: dict[str, float]) -> None:
    cost = CostModel.from_coefficients(**real)
    assert CostModel.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


def test_the_config_knows_every_policy() -> None:
    named, nothing = get_args(PackingConfig.model_fields["policy"].annotation)
    assert (set(get_args(named)), nothing) == (POLICIES.keys(), type(None))
