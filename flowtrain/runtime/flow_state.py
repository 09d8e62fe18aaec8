"""What `flow` keeps of a step and of a pack until they are done, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowtrain.pool.directory import Expired
from flowtrain.types import EmbeddingRef, EncodeUnit, Pack, Phase, Role, SkippedRow, Step, UnitId

StepKey = tuple[Phase, int]


@dataclass(slots=True)
class StepState:
    """What is left to do of one step; `slots_left`: packs that are not done, by slot."""

    step: Step
    packs_left: int
    units_left: int
    units_to_encode: int
    slots_left: list[int]
    first_open_slot: int = 0
    begun: bool = False
    reduce_sent: set[tuple[Role, int]] = field(default_factory=set)
    bad: dict[int, SkippedRow] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step) -> StepState:
        num_units = sum(len(pack.units) for pack in step.packs)
        return cls(step, len(step.packs), num_units, num_units, [len(slot) for slot in step.slots])

    def pack_done(self, slot: int) -> None:
        self.packs_left -= 1
        self.slots_left[slot] -= 1
        while self.first_open_slot < len(self.slots_left) and not self.slots_left[self.first_open_slot]:
            self.first_open_slot += 1


@dataclass(slots=True)
class Woken:
    """Whom to look at: something has happened to them since they were found waiting. All others still wait.

    Attributes:
        packs: consumers that may run a pack; `reduces`: ranks by side that may reduce.
        returns: groups of producers that may return gradients.
        frees: producers with blocks that were released.
    """

    packs: set[int] = field(default_factory=set)
    returns: set[int] = field(default_factory=set)
    frees: set[int] = field(default_factory=set)
    reduces: dict[Role, set[int]] = field(default_factory=lambda: {Role.CONSUMER: set(), Role.PRODUCER: set()})

    def all(self, num_consumers: int, num_producers: int, num_groups: int) -> None:
        """A step came, or ended: any rank may have waited for that."""
        self.packs.update(range(num_consumers))
        self.returns.update(range(num_groups))
        self.reduces[Role.CONSUMER].update(range(num_consumers))
        self.reduces[Role.PRODUCER].update(range(num_producers))


@dataclass(slots=True)
class PackState:
    """A pack, the units that it waits for, and the features that are there, by position."""

    pack: Pack
    key: StepKey
    missing: set[UnitId]
    refs: dict[int, EmbeddingRef] = field(default_factory=dict)


def waiting_text(
    unsent: tuple[StepKey, EncodeUnit, bool] | None,
    heads: Sequence[PackState | None],
    owner: Mapping[UnitId, int],
    in_flight: Mapping[str, Sequence[int]],
) -> str:
    """Who waits for whom. `unsent`: the oldest unit that was not sent, and whether its step may be encoded; `heads`:
    the next pack of each consumer; `in_flight` as in `_busy_text`."""
    parts = []
    if unsent is not None:
        (_, step), unit, may_encode = unsent
        why = "room in the pool" if may_encode else f"the update of step {step - 1}"
        where = f"{unit.id.phase} step {unit.id.step}, slot {unit.id.slot}, rank {unit.id.rank}"
        parts.append(f"unit {unit.id.number} of {where} waits for {why}")
    parts += [_missing_text(rank, pack, owner) for rank, pack in enumerate(heads) if pack is not None]
    return "; ".join((*filter(None, parts), _busy_text(in_flight)))


def _missing_text(rank: int, pack: PackState, owner: Mapping[UnitId, int]) -> str:
    """Whose units the pack of a consumer waits for; nothing where it waits for none."""
    if not pack.missing:
        return ""
    owners = sorted({owner[unit] for unit in pack.missing if unit in owner})
    whose = f"of producer {', '.join(map(str, owners))}" if owners else "not yet sent to a producer"
    return f"consumer {rank} waits for units {whose}"


def _busy_text(in_flight: Mapping[str, Sequence[int]]) -> str:
    """Ranks with orders in flight, by kind of order: `producer (backward)` → their number for each rank."""
    busy = [
        " ".join((name, str(rank), *kind))
        for role, numbers in in_flight.items()
        for name, *kind in [role.split()]
        for rank, number in enumerate(numbers)
        if number
    ]
    return "in flight: " + (", ".join(busy) or "nothing")


def expired_text(role: Role, rank: int, expired: Expired) -> str | None:
    """What a process that died leaves in the pool; None where it had no lease."""
    if not any(expired):
        return None
    return (
        f"{role} {rank} had leased blocks of the pool: features of {len(expired.readable)} samples can be read by "
        f"others, {len(expired.lost)} may hold half a gradient"
    )
