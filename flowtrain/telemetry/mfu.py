"""Model FLOPs utilisation: needed FLOPs over what all devices could do in the time (contract C13).

    mfu(%)                (encoder + projector + backbone) / (step seconds · peak of all devices)
    mfu/encoder(%)        FLOPs of the producer side       / (step seconds · peak of the producers)
    mfu/backbone(%)       FLOPs of the consumer side       / (step seconds · peak of the consumers)
    mfu/backbone_palm(%)  the backbone's by PaLM's formula / (step seconds · peak of the consumers)

The projector counts on the side where it runs. FLOPs come from `flowtrain.flops`: causal attention by Σℓ² of samples,
no padding, no recompute, frozen parts forward only. When devices are both sides (colocated) both shares are over them,
and their sum is `mfu(%)`. A share of an unknown peak is not known.

Worked example: one producer and one consumer, peak 1e12 FLOP/s each; a step of 2 s needs 1e12 FLOPs on the producer
and 1.6e12 on the consumer: 50 % of the producer, 80 % of the consumer, together 2.6e12 / (2 · 2e12) = 65 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flowtrain.types import Cut

if TYPE_CHECKING:
    from flowtrain.flops import StepFlops


class Peak(NamedTuple):
    """`value` in FLOP/s of one device, None where it is not known; `source` says whose figure it is, or why none."""

    value: float | None
    source: str


class MfuShares(NamedTuple):
    """Percent, 0 to 100; None where the peak is not known."""

    all: float | None
    encoder: float | None
    backbone: float | None
    backbone_palm: float | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of a run: one peak a rank, in rank order. `colocated`: both sides of a rank are one device."""

    producers: tuple[Peak, ...]
    consumers: tuple[Peak, ...]
    cut: Cut = Cut.AFTER_PROJECTOR
    colocated: bool = False

    def __post_init__(self) -> None:
        assert self.producers, "no producer device"
        assert self.consumers, "no consumer device"
        assert not self.colocated or len(self.producers) == len(self.consumers), "colocated ranks come in pairs"

    @property
    def devices(self) -> tuple[Peak, ...]:
        return self.consumers if self.colocated else (*self.producers, *self.consumers)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of all devices together."""
        return _sum(self.devices)

    @property
    def source(self) -> str:
        """Where the peaks come from, each source once."""
        return "; ".join(dict.fromkeys(peak.source for peak in (*self.producers, *self.consumers)))

    @property
    def unknown(self) -> str:
        """Why the peak is not known, each reason once; empty where it is."""
        return "; ".join(dict.fromkeys(peak.source for peak in self.devices if peak.value is None))

    def mfu(self, flops: StepFlops, seconds: float, palm_flops: float | None = None) -> MfuShares:
        """Shares of one step; `palm_flops`: the backbone's by the other formula."""
        on_producers, on_consumers = flops.encoder, flops.backbone
        if self.cut is Cut.AFTER_PROJECTOR:
            on_producers += flops.projector
        else:
            on_consumers += flops.projector
        consumers = _sum(self.consumers)
        return MfuShares(
            mfu(flops.total, seconds, self.peak_flops),
            mfu(on_producers, seconds, _sum(self.producers)),
            mfu(on_consumers, seconds, consumers),
            None if palm_flops is None else mfu(palm_flops, seconds, consumers),
        )


def mfu(needed_flops: float, seconds: float, peak: float | None) -> float | None:
    """Percent of `peak` FLOP/s that `needed_flops` in `seconds` use.

    Example:
        >>> mfu(3e12, seconds=2.0, peak=2e12)
        75.0
    """
    assert seconds > 0, seconds
    return None if peak is None else 100.0 * needed_flops / (seconds * peak)


def _sum(peaks: tuple[Peak, ...]) -> float | None:
    values = [peak.value for peak in peaks if peak.value is not None]
    return sum(values) if len(values) == len(peaks) else None
