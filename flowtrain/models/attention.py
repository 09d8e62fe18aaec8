"""Attention over a pack: every sample sees itself only, and the cost is Σℓ² instead of (Σℓ)² (contract C5).

The boundaries arrive as explicit keywords of the model's `forward`, which transformers hands down to the attention
function:

    model(..., pack_lengths=Lengths([7, 19, 4]), pack_offsets=tensor([0, 7, 26, 30]), pack_blocks=ImageBlocks(…))

| a token sees | where |
|---|---|
| itself and those before it, of its sample | always |
| of them the last `sliding_window` | layers that slide |
| those behind it of its run of image tokens | families with image blocks (Gemma 3) |

| name | kernel | where |
|---|---|---|
| `flowtrain_packs` | one causal `scaled_dot_product_attention` a sample | everywhere, every dtype |
| `flowtrain_packs_varlen` | torch's variable-length flash attention, one call a layer | CUDA, bfloat16 |

The names are not known to transformers' mask makers, so that no (Σℓ)² mask is ever built; a sample with image blocks,
or longer than the window, has one of ℓ².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flowtrain.errors import PlanError

SEGMENTS = "flowtrain_packs"
VARLEN = "flowtrain_packs_varlen"


class Lengths(Sequence[int]):
    """Tokens of each sample of a pack. torch.compile takes a tuple apart, and would compile a layer again for every
    number of samples; of this it knows the type only."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        return self._lengths[index]


@dataclass(frozen=True, slots=True)
class ImageBlocks:
    """For each segment the (T,) number of the image block that a token is in (-1: none), or None without images.

    `of_segments` is None in families whose images are causal like text. Masks are made once a forward, not a layer.
    """

    of_segments: tuple[torch.Tensor | None, ...] | None = None
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, segment: int, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """(T, T) of what each token sees, or None where that is just everything before it."""
        numbers = None if self.of_segments is None else self.of_segments[segment]
        reach = window if window is not None and window < length else None
        if numbers is None and reach is None:
            return None
        key = (segment, reach)
        if key not in self._masks:
            place = torch.arange(length, device=device)
            ahead = place[None, :] - place[:, None]
            seen = ahead <= 0
            if numbers is not None:
                seen |= (numbers[:, None] == numbers[None, :]) & (numbers >= 0)
            if reach is not None:
                seen &= ahead > -reach
            self._masks[key] = seen
        return self._masks[key]


NO_BLOCKS = ImageBlocks()


def attention_by_segments(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack_lengths: Sequence[int],
    pack_blocks: ImageBlocks = NO_BLOCKS,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each segment of `pack_lengths`: causal, and as the page above says.

    Args:
        query: (1, heads, T, dim); key and value: (1, key heads, T, dim).
        pack_lengths: tokens of each sample, in order; they add up to T.

    Returns:
        (1, T, heads, dim), and None for the weights.
    """
    _check(query, attention_mask, pack_lengths, kwargs)
    grouped = query.shape[1] != key.shape[1]
    pieces = []
    segments = zip(*(t.split(list(pack_lengths), dim=2) for t in (query, key, value)), strict=True)
    for number, (q, k, v) in enumerate(segments):
        length = q.shape[2]
        mask = pack_blocks.mask(number, length, sliding_window, q.device)
        causal = mask is None and length > 1
        pieces.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=causal, enable_gqa=grouped
            )
        )
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
    pack_blocks: ImageBlocks = NO_BLOCKS,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same with one kernel call; `pack_offsets` is the running sum of `pack_lengths` on the device, int32."""
    from torch.nn.attention.varlen import varlen_attn

    _check(query, attention_mask, pack_lengths, kwargs)
    assert dropout == 0.0, "the variable-length kernel has no dropout"
    assert pack_blocks.of_segments is None, "the variable-length kernel is causal: image blocks need another"
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
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


class Exchange(Protocol):
    """Ranks that share the heads or the tokens of a pack, around the attention of one layer."""

    def enter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What this rank attends with: (1, heads, T, dim) of some heads, and all tokens of the pack."""
        ...

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """(1, T, heads, dim) of these heads → what the layer goes on with."""
        ...


def add_exchange(attention: torch.nn.Module, exchange: Exchange) -> None:
    """Have the kernels exchange around this layer's attention, inside of the exchanges that it has."""
    attention.pack_exchanges = (*_exchanges(attention), exchange)  # type: ignore[assignment]


def _exchanges(attention: torch.nn.Module) -> tuple[Exchange, ...]:
    found: tuple[Exchange, ...] = getattr(attention, "pack_exchanges", ())
    return found


def exchanged(kernel: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """The kernel, inside of a layer's exchanges. Never compiled: borders differ from pack to pack."""

    @torch.compiler.disable
    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        exchanges = _exchanges(module)
        for exchange in exchanges:
            query, key, value = exchange.enter(query, key, value)
        out, _ = kernel(module, query, key, value, *args, **kwargs)
        for exchange in reversed(exchanges):
            out = exchange.leave(out)
        return out, None

    return attention


KERNELS = {SEGMENTS: exchanged(attention_by_segments), VARLEN: exchanged(attention_by_varlen)}


def register() -> None:
    """Make the kernels known to transformers by name; may be called any number of times."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(name, kernel)


def has_flash(device: torch.device) -> bool:
    """Whether the device runs torch's flash attention: CUDA from compute capability 8.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_kernel(
    asked: Literal["auto", "sdpa", "flash"],
    flash: bool,
    compute_dtype: torch.dtype,
    dropout: float = 0.0,
    image_blocks: bool = False,
) -> str:
    """Name of the kernel for packs; `flash` tells whether the device has it, `image_blocks` is the family's.

    Raises:
        PlanError: `flash` was asked for where it cannot run.
    """
    if asked == "flash" and image_blocks:
        raise PlanError(
            "model.attention: flash is causal, and the image tokens of this model family see each other both ways; "
            "set model.attention: auto"
        )
    usable = flash and compute_dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and not image_blocks
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
    assert kwargs.get("softcap") is None, "logit soft-capping is not supported in packs"
    assert kwargs.get("s_aux") is None, "attention sinks are not supported in packs"
