"""Model FLOPs utilisation: needed FLOPs over what all devices could do in the time (contract C13).

    mfu(%)            (encoder + projector + backbone) / (step seconds · peak of all devices)
    mfu/encoder(%)    FLOPs of the producer side       / (step seconds · peak of the producers)
    mfu/backbone(%)   FLOPs of the consumer side       / (step seconds · peak of the consumers)

The projector counts on the side where it runs. FLOPs come from `flowtrain.flops`: causal attention by Σℓ² of samples,
no padding, no recompute, frozen parts forward only. When one device is both sides (colocated) both shares are over it,
and their sum is `mfu(%)`.

Worked example: one producer and one consumer, peak 1e12 FLOP/s each; a step of 2 s needs 1e12 FLOPs on the producer
and 1.6e12 on the consumer: 50 % of the producer, 80 % of the consumer, together 2.6e12 / (2 · 2e12) = 65 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flowtrain.telemetry.peaks import Peak
from flowtrain.types import Cut

if TYPE_CHECKING:
    from flowtrain.flops import StepFlops


class MfuShares(NamedTuple):
    """Percent, 0 to 100."""

    all: float
    encoder: float
    backbone: float


def mfu(step_flops: float, seconds: float, num_devices: int, peak: float) -> float:
    """Percent of `num_devices` devices of `peak` FLOP/s each that `step_flops` in `seconds` use.

    Example:
        >>> mfu(step_flops=3e12, seconds=2.0, num_devices=2, peak=1e12)
        75.0
    """
    assert min(seconds, num_devices, peak) > 0, (seconds, num_devices, peak)
    return 100.0 * step_flops / (seconds * num_devices * peak)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of a run: one peak a rank, in rank order. `colocated`: the one rank of both sides is one device."""

    producers: tuple[Peak, ...]
    consumers: tuple[Peak, ...]
    cut: Cut = Cut.AFTER_PROJECTOR
    colocated: bool = False

    def __post_init__(self) -> None:
        assert self.producers, "no producer device"
        assert self.consumers, "no consumer device"
        assert not self.colocated or (len(self.producers), len(self.consumers)) == (1, 1), "colocated is one device"

    @property
    def num_devices(self) -> int:
        return len(self.consumers) + (0 if self.colocated else len(self.producers))

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all devices together."""
        return _sum(self.consumers) + (0.0 if self.colocated else _sum(self.producers))

    @property
    def source(self) -> str:
        """Where the peaks come from, each source once."""
        return "; ".join(dict.fromkeys(peak.source for peak in (*self.producers, *self.consumers)))

    def mfu(self, flops: StepFlops, seconds: float) -> MfuShares:
        """Shares of one step."""
        on_producers, on_consumers = float(flops.encoder), float(flops.backbone)
        if self.cut is Cut.AFTER_PROJECTOR:
            on_producers += flops.projector
        else:
            on_consumers += flops.projector
        return MfuShares(
            mfu(flops.total, seconds, 1, self.peak_flops),
            mfu(on_producers, seconds, 1, _sum(self.producers)),
            mfu(on_consumers, seconds, 1, _sum(self.consumers)),
        )


def _sum(peaks: tuple[Peak, ...]) -> float:
    return sum(peak.value for peak in peaks)
