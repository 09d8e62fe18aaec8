"""The table of modes: a mode is a value on each of four axes, and any axis can be set by itself (contract C8).

| axis | key that overrides the mode's |
|---|---|
| placement | `allocation.placement` |
| exchange | `pool.exchange` |
| allocation | `allocation.policy` |
| composition | `packing.policy` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Placement = Literal["colocated", "disaggregated"]
ExchangeName = Literal["pool", "barrier_pipeline", "barrier_step"]
ModeName = Literal["flow", "disaggregated", "monolithic"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A row. In one process (`colocated`) both sides take turns whatever the exchange."""

    placement: Placement
    exchange: ExchangeName
    allocation: str
    composition: str


MODES: Mapping[ModeName, Mode] = {
    "flow": Mode("disaggregated", "pool", "flow_matching", "dynamic"),
    "disaggregated": Mode("disaggregated", "barrier_pipeline", "stage_balanced", "raw_size"),
    "monolithic": Mode("colocated", "pool", "uniform", "dynamic"),
}
"""`monolithic` packs as `flow` does: it is also how one device trains best. The baseline of that name packs by
`arrival` (`flowtrain bench`)."""
