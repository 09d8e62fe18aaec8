"""The control messages: what the controller asks of a stage, and what the stage answers.

Every message is a call and its reply; there is no other traffic between the controller and a stage. Leases travel in
them (contract C6): an order carries the addresses that its receiver may free, an answer the addresses now written.

    controller                         producer                     consumer
      EncodeOrder ───────────────────▶ encode ──▶ UnitEncoded
      PackOrder ─────────────────────────────────────────────────▶ train ──▶ PackTrained
      BackwardOrder ─────────────────▶ backward ▶ UnitsReturned                (trainable encoder)
      ReduceOrder ───────────────────▶ reduce ──▶ ReduceReport ◀── reduce ◀──  (once a step, both sides)
      UpdateOrder ───────────────────▶ update ──▶ UpdateReport ◀── update ◀──
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.types import Address, EmbeddingRef, EncodeUnit, Module, Pack, Phase, SkippedRow, UnitId


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What one order did with the pool: seconds in its calls, payload bytes written into it and read out of it, by
    transport (`own`: features put into the process's own segment), and bytes that it has page-locked."""

    seconds: float = 0.0
    bytes_in: Mapping[str, int] = field(default_factory=dict)
    bytes_out: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """Encode one unit and put the features of each sample into your segment.

    `free` is applied to the arena, in order, before anything is allocated. `keep_graph`: a backward will follow.
    """

    unit: EncodeUnit
    version: int
    keep_graph: bool
    free: tuple[Address, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """Those of the step that the work is for."""
        return (self.unit.id.slot,)


@dataclass(frozen=True, slots=True)
class UnitEncoded:
    """One `EmbeddingRef` per sample of the unit, in unit order; a row found bad has no ref and is listed in `bad`.

    `seconds`: spent on the unit; `waited`: idle before it since this producer's last order (stall).
    """

    unit: UnitId
    producer: int
    refs: tuple[EmbeddingRef, ...]
    bad: tuple[SkippedRow, ...]
    seconds: float
    waited: float
    pool: PoolUse = PoolUse()


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Run one pack.

    `masked`: positions of rows found bad, which take no part. `return_gradients`: write the gradient of each feature
    over its bytes in the pool before answering. `num_slots`: packs of each rank in the step.
    """

    phase: Phase
    step: int
    pack: Pack
    refs: tuple[EmbeddingRef, ...]
    masked: tuple[int, ...]
    return_gradients: bool
    num_slots: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the payload blocks that hold its token ids, ascending."""
        return tuple(sorted({sample.block for sample in self.pack.samples}))

    @property
    def slots(self) -> tuple[int, ...]:
        """That of the step that the work is for."""
        return (self.pack.slot,)


@dataclass(frozen=True, slots=True)
class PackTrained:
    """Sum of the token losses and number of surviving trained tokens of one pack; all its leases end with this answer.

    `seconds`: spent on the pack; `waited`: idle before it since this consumer's last order (starvation).
    """

    phase: Phase
    step: int
    slot: int
    rank: int
    loss_sum: float
    trained_tokens: int
    seconds: float
    waited: float
    pool: PoolUse = PoolUse()


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """Gradients of these units lie in your segment: run their backwards in this order."""

    units: tuple[UnitId, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """Those of the step that the work is for."""
        return tuple(unit.slot for unit in self.units)


@dataclass(frozen=True, slots=True)
class UnitsReturned:
    """The gradients were read; their blocks may be freed by the next order. Times as in `UnitEncoded`."""

    units: tuple[UnitId, ...]
    producer: int
    seconds: float
    waited: float
    pool: PoolUse = PoolUse()


@dataclass(frozen=True, slots=True)
class ReduceOrder:
    """All packs of the step are done: sum the gradients over the ranks of your side."""

    step: int


@dataclass(frozen=True, slots=True)
class ReduceReport:
    """Σg² per module in float64, of gradients of the *sum* of losses, after the sum over ranks. A module that no sample
    reached is absent."""

    step: int
    square_sums: dict[Module, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """Multiply every gradient by `scale` (1 / trained tokens of the step), then by `clip` (≤ 1), and step the optimizer
    with the learning rate of each module.

    `gradients_to`: a folder (verify) to write the scaled, unclipped gradients to and, after the update, the parameters.
    `apply` is False when the step is left out: no trained token, or a gradient that is not finite.
    """

    step: int
    scale: float
    clip: float
    lr: dict[Module, float]
    apply: bool = True
    gradients_to: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The update is made; `max_memory_bytes`: the most that the process has held so far; `waited`: idle between its
    report of the norms and the update."""

    step: int
    max_memory_bytes: int
    waited: float = 0.0
