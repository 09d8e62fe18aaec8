"""Attention over packs equals attention of each sample alone, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from flowtrain.errors import PlanError
from flowtrain.models.attention import (
    SEGMENTS,
    VARLEN,
    ImageBlocks,
    attention_by_segments,
    attention_by_varlen,
    choose_kernel,
    has_flash,
)
from flowtrain.models.families import block_numbers

DIM = 8


def _projections(total: int, heads: int, key_heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, n, total, DIM, generator=generator, dtype=torch.float64) for n in (heads, key_heads, key_heads)
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    grouped=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
    window=st.none() | st.integers(1, 10),
    images=st.none() | st.lists(st.booleans(), min_size=54, max_size=54),
)
def test_equals_one_masked_square(
    lengths: list[int], grouped: int, seed: int, window: int | None, images: list[bool] | None
) -> None:
    """Own sample only; causal, or both ways within a run of image tokens; of these the last `window`."""
    total = sum(lengths)
    query, key, value = _projections(total, 4, 4 // grouped, seed)
    is_image = torch.tensor((images or [False] * 54)[:total])
    blocks = ImageBlocks(None if images is None else tuple(block_numbers(p) for p in is_image.split(lengths)))
    out, none = attention_by_segments(
        torch.nn.Identity(), query, key, value, None,
        pack_lengths=lengths, pack_blocks=blocks, scaling=0.3, sliding_window=window,
    )  # fmt: skip
    assert none is None
    sample = [number for number, length in enumerate(lengths) for _ in range(length)]
    visible = torch.zeros(total, total, dtype=torch.bool)
    for i in range(total):
        for j in range(total):
            run = is_image[min(i, j) : max(i, j) + 1].all()
            near = window is None or i - j < window
            visible[i, j] = sample[i] == sample[j] and (j <= i or run) and near
    expected = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_borders_that_do_not_fit_are_our_bug() -> None:
    query, key, value = _projections(6, 2, 2, 0)
    module = torch.nn.Identity()
    with pytest.raises(AssertionError, match="add up to 5"):
        attention_by_segments(module, query, key, value, None, pack_lengths=(2, 3))
    with pytest.raises(AssertionError, match="never from a mask"):
        attention_by_segments(module, query, key, value, torch.ones(6, 6), pack_lengths=(6,))
    with pytest.raises(AssertionError, match="soft-capping"):
        attention_by_segments(module, query, key, value, None, pack_lengths=(6,), softcap=30.0)
    with pytest.raises(AssertionError, match="sinks"):
        attention_by_segments(module, query, key, value, None, pack_lengths=(6,), s_aux=torch.zeros(2))


def test_kernel_follows_device_and_dtype() -> None:
    assert choose_kernel("auto", False, torch.bfloat16) == SEGMENTS
    assert choose_kernel("auto", True, torch.float32) == SEGMENTS
    assert choose_kernel("sdpa", True, torch.bfloat16) == SEGMENTS
    assert choose_kernel("auto", True, torch.bfloat16) == VARLEN
    assert choose_kernel("flash", True, torch.bfloat16) == VARLEN
    assert choose_kernel("auto", True, torch.bfloat16, dropout=0.1) == SEGMENTS
    assert choose_kernel("auto", True, torch.bfloat16, image_blocks=True) == SEGMENTS
    with pytest.raises(PlanError, match=r"model\.attention: flash is causal"):
        choose_kernel("flash", True, torch.bfloat16, image_blocks=True)
    with pytest.raises(PlanError, match=r"model\.attention: flash needs a CUDA device .* has no such device"):
        choose_kernel("flash", has_flash(torch.device("cpu")), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_variable_length_kernel_agrees_with_segments() -> None:
    """On a CPU `test_equals_one_masked_square` holds for segments, which this kernel replaces."""
    lengths = (1, 17, 40, 6)
    offsets = torch.tensor([0, 1, 18, 58, 64], dtype=torch.int32, device="cuda")
    projections = [t.to("cuda", torch.bfloat16) for t in _projections(64, 4, 2, 5)]
    module = torch.nn.Identity()
    expected, _ = attention_by_segments(module, *projections, None, pack_lengths=lengths, scaling=0.3)
    out, _ = attention_by_varlen(module, *projections, None, pack_lengths=lengths, pack_offsets=offsets, scaling=0.3)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
