"""The one clip factor that both sides of the cut apply (contract C7): the formula of torch's `clip_grad_norm_`."""

from __future__ import annotations

CLIP_EPS = 1e-6


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What every gradient is multiplied by, at most 1.

    Args:
        norm: global gradient norm over all modules, before clipping.
        clip_norm: the bound; None: never clip.

    Example:
        >>> clip_factor(2.0, None)
        1.0
        >>> clip_factor(0.5, 1.0)
        1.0
    """
    if clip_norm is None:
        return 1.0
    assert norm >= 0, f"a norm is not negative: {norm}"
    return min(1.0, clip_norm / (norm + CLIP_EPS))
