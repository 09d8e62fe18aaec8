"""States of a block, the moves between them that are legal, and the error that tells a block's story."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from flowtrain.pool.address import place_of
from flowtrain.types import Address, Role, UnitId

Holder = tuple[Role, int]
"""Who has a lease: a role and its rank."""


class Lease(Enum):
    """`flowtrain.pool.directory` says what each means."""

    RESERVED = "reserved"
    WRITTEN = "written"
    LEASED = "leased"
    PENDING = "gradient pending"
    GRADIENT = "gradient written"
    LOST = "lost"
    RELEASED = "released"


class Event(Enum):
    """What moves a block from one state to the next."""

    WRITE = "be written"
    LEASE = "be leased"
    LEASE_FOR_GRADIENT = "be leased for a gradient"
    WRITE_GRADIENT = "have a gradient"
    LOSE_READERS = "be readable again"
    LOSE_WRITER = "be lost"
    RELEASE = "be released"


LEGAL: dict[Event, tuple[frozenset[Lease], Lease]] = {
    Event.WRITE: (frozenset({Lease.RESERVED}), Lease.WRITTEN),
    Event.LEASE: (frozenset({Lease.WRITTEN, Lease.LEASED}), Lease.LEASED),
    Event.LEASE_FOR_GRADIENT: (frozenset({Lease.WRITTEN}), Lease.PENDING),
    Event.WRITE_GRADIENT: (frozenset({Lease.PENDING}), Lease.GRADIENT),
    Event.LOSE_READERS: (frozenset({Lease.LEASED}), Lease.WRITTEN),
    Event.LOSE_WRITER: (frozenset({Lease.PENDING}), Lease.LOST),
    Event.RELEASE: (frozenset({Lease.RESERVED, Lease.LEASED, Lease.GRADIENT, Lease.LOST}), Lease.RELEASED),
}
"""Event → states from which it is legal, and the state that follows; reserving makes a block, a release ends it."""


class IllegalTransition(AssertionError):
    """A block was used as its state does not allow: a bug of ours, told with the block's events so far."""

    def __init__(self, address: Address, what: str, story: Sequence[str]) -> None:
        self.story = tuple(story)
        told = "; ".join(story) or "nothing is known of it"
        super().__init__(f"block at {place_of(address)} {what} (its story by number of event: {told})")


def holder_name(holder: Holder) -> str:
    return f"{holder[0].value} {holder[1]}"


def unit_name(unit: UnitId) -> str:
    return f"{unit.number} of {unit.phase} step {unit.step}, slot {unit.slot}, rank {unit.rank}"
