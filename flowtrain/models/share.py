"""What changes in a backbone's forward where several ranks run it together; alone, nothing does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import cross_entropy


def _same(tensor: Tensor) -> Tensor:
    return tensor


_summed_cross_entropy = partial(cross_entropy, reduction="sum")


def _all_places(places_K: Tensor, targets_K: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return places_K, targets_K


@dataclass(frozen=True, slots=True)
class Share:
    """
    Attributes:
        multiple: a forward's number of tokens is padded to a multiple of this, by a sample of its own that nothing is
            trained on.
        features: a tensor of features as it goes in.
        places: (K,) places with a label, (K,) ids that they predict and the number of tokens → those of this rank,
            counted from its first token.
        cross_entropy: logits (K, rows of the vocabulary here) and (K,) target ids → sum of the token losses.
        total: the loss of this rank's places → the pack's.
        whole_tokens: (1, tokens here, D) of a layer → (1, T, D) of the pack.
        own_tokens: the reverse, without a gradient.
    """

    multiple: int = 1
    features: Callable[[Tensor], Tensor] = _same
    places: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = _all_places
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = _summed_cross_entropy
    total: Callable[[Tensor], Tensor] = _same
    whole_tokens: Callable[[Tensor], Tensor] = _same
    own_tokens: Callable[[Tensor], Tensor] = _same


ALONE = Share()
