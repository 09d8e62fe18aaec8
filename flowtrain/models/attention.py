"""Attention over a pack: every sample sees itself only, and the cost is Σℓ² instead of (Σℓ)² (contract C5).

The boundaries arrive as explicit keywords of the model's `forward`, which transformers hands down to the attention
function:

    model(..., pack_lengths=(7, 19, 4), pack_offsets=tensor([0, 7, 26, 30]))

| name | kernel | where |
|---|---|---|
| `flowtrain_packs` | one causal `scaled_dot_product_attention` a sample | everywhere, every dtype |
| `flowtrain_packs_varlen` | torch's variable-length flash attention, one call a layer | CUDA, bfloat16 |

The names are not known to transformers' mask makers, so that no (Σℓ)² mask is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flowtrain.errors import PlanError

SEGMENTS = "flowtrain_packs"
VARLEN = "flowtrain_packs_varlen"


def attention_by_segments(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment of `pack_lengths`.

    Args:
        query: (1, heads, T, dim); key and value: (1, key heads, T, dim).
        pack_lengths: tokens of each sample, in order; they add up to T.

    Returns:
        (1, T, heads, dim), and None for the weights.
    """
    _check(query, attention_mask, pack_lengths, kwargs)
    grouped = query.shape[1] != key.shape[1]
    pieces = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=q.shape[2] > 1, enable_gqa=grouped
        )
        for q, k, v in zip(*(t.split(list(pack_lengths), dim=2) for t in (query, key, value)), strict=True)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def attention_by_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack_lengths: Sequence[int],
    pack_offsets: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same with one kernel call; `pack_offsets` is the running sum of `pack_lengths` on the device, int32."""
    from torch.nn.attention.varlen import varlen_attn

    _check(query, attention_mask, pack_lengths, kwargs)
    assert dropout == 0.0, "the variable-length kernel has no dropout"
    longest = max(pack_lengths)
    dtype = _autocast_dtype(value)
    q_THD, k_THD, v_THD = (t[0].transpose(0, 1).to(dtype) for t in (query, key, value))
    out = varlen_attn(
        q_THD,
        k_THD,
        v_THD,
        pack_offsets,
        pack_offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


KERNELS = {SEGMENTS: attention_by_segments, VARLEN: attention_by_varlen}


def register() -> None:
    """Make the kernels known to transformers by name; may be called any number of times."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(name, kernel)


def has_flash(device: torch.device) -> bool:
    """Whether the device runs torch's flash attention: CUDA from compute capability 8.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_kernel(
    asked: Literal["auto", "sdpa", "flash"], flash: bool, compute_dtype: torch.dtype, dropout: float = 0.0
) -> str:
    """Name of the kernel for packs; `flash` tells whether the device has it.

    Raises:
        PlanError: `flash` was asked for where it cannot run.
    """
    usable = flash and compute_dtype in (torch.bfloat16, torch.float16) and dropout == 0.0
    if asked == "flash" and not usable:
        raise PlanError(
            "model.attention: flash needs a CUDA device of compute capability 8.0, 16-bit compute and no "
            f"attention dropout; this run has {'such a' if flash else 'no such'} device, "
            f"{str(compute_dtype).removeprefix('torch.')} and dropout {dropout}: set model.attention: auto"
        )
    return VARLEN if usable and asked != "sdpa" else SEGMENTS


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Queries may have another dtype than values after norms; autocast does not reach a custom kernel."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


def _check(
    query: torch.Tensor, attention_mask: torch.Tensor | None, pack_lengths: Sequence[int], kwargs: dict[str, Any]
) -> None:
    assert query.shape[0] == 1, "a pack is one long row"
    assert attention_mask is None, "boundaries come from pack_lengths, never from a mask"
    assert sum(pack_lengths) == query.shape[2], (
        f"pack lengths add up to {sum(pack_lengths)}, the pack has {query.shape[2]}"
    )
    window = kwargs.get("sliding_window")
    assert window is None or max(pack_lengths) <= window, f"a sample is longer than the attention window of {window}"
    assert kwargs.get("softcap") is None, "logit soft-capping is not supported in packs"
