"""What encoder and backbone wait for beside features and room: the exchange axis of the modes (pure, contract C8).

| exchange | units of the next step | units of this step | a pack | gradients |
|---|---|---|---|---|
| `pool` | as the pool has room | as the pool has room | has its own units | have their pack |
| `barrier_pipeline` | when this step is done | one slot ahead | has its own units | have their pack |
| `barrier_step` | when this step is done | at once | has all units of the step | have all packs |
| colocated | when this step is done | as the pool has room | has its own units | have their pack |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain.errors import PlanError


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rules on top of those of data and memory.

    Attributes:
        within_step: nothing of a step is encoded while the one before is not done.
        slots_ahead: slots that may be encoded beyond the first one that is not done; None: all.
        whole_steps: one side at a time: encode the step, run its packs, return its gradients.
        prefill: packs per consumer that are there before the first one of a run: a reserve against uneven rows, which
            would grow only as fast as the sides' loads differ.
    """

    within_step: bool = False
    slots_ahead: int | None = None
    whole_steps: bool = False
    prefill: int = 0


def check_room(step: int, sizes: Sequence[int], room: int) -> None:
    """PlanError unless all blocks of a step fit into one segment of `room` bytes, wherever its ring stands: where whole
    steps are exchanged, they are all there before a pack runs."""
    needed = sum(sizes) + max(sizes, default=0)
    if needed > room:
        raise PlanError(
            f"pool.exchange barrier_step keeps all features of a step: {needed} bytes for step {step}, and a segment "
            f"of the pool has {room}: raise pool.bytes, make steps smaller, or use another exchange"
        )


EXCHANGES: Mapping[str, Exchange] = {
    "pool": Exchange(),
    "barrier_pipeline": Exchange(within_step=True, slots_ahead=1),
    "barrier_step": Exchange(within_step=True, whole_steps=True),
}
"""Name in `pool.exchange` → rules."""

COLOCATED = Exchange(within_step=True)
"""Of ranks whose sides take turns: what they encoded ahead of a step would be work taken from it, kept in the pool."""


def exchange_of(name: str, *, colocated: bool, prefill: int) -> Exchange:
    """Rules of a run. `prefill` takes effect where encoders run ahead of a step."""
    exchange = COLOCATED if colocated else EXCHANGES[name]
    return exchange if exchange.within_step else replace(exchange, prefill=prefill)
