"""The producers as flow control sees them: orders in flight, room in segments, blocks that they are to free (pure).

Producers that share an encoder's parameters are a group; otherwise each is its own (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flowtrain.pool.directory import Directory
from flowtrain.runtime.rounds import Round, ranks_of
from flowtrain.types import Address, UnitId

DEPTH = 2
"""Orders in flight to one rank: one running and one waiting hides the round trip of a call."""

READY_AHEAD = 2
"""Packs ready per consumer rank beyond which a producer prefers returning gradients to encoding more."""


class Producers:
    """`owners`: the pool's owner id of each producer; `shards`: producers of a group."""

    def __init__(self, directory: Directory, owners: Sequence[int], shards: int) -> None:
        self.directory = directory
        self.shards = shards
        self.owners = tuple(owners)
        self.encodes_in_flight = [0] * len(owners)
        self.backwards_in_flight = [0] * len(owners)
        self.frees: list[list[Address]] = [[] for _ in owners]
        self._without_room: set[int] = set()
        """Groups without room for the first of the rounds that any may take."""

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def groups(self) -> range:
        return range(len(self.owners) // self.shards)

    @property
    def idle(self) -> bool:
        return not any((*self.encodes_in_flight, *self.backwards_in_flight))

    def resize(self, owners: Sequence[int]) -> None:
        """Other owners; the first ones stay, nothing being in flight."""
        staying = self.frees[: len(owners)]
        self.owners = tuple(owners)
        self.encodes_in_flight = [0] * len(owners)
        self.backwards_in_flight = [0] * len(owners)
        self.frees = [*staying, *([] for _ in range(len(owners) - len(staying)))]
        self._without_room.clear()

    def take_frees(self, ranks: Iterable[int]) -> None:
        """What these are to free is room from now on, since their next order tells them."""
        for rank in sorted(ranks):
            self.frees[rank].extend(self.directory.frees(self.owners[rank]))
            self._without_room.discard(rank // self.shards)

    def may_encode(self, group: int) -> bool:
        return self._busy(group, self.encodes_in_flight) < DEPTH

    def may_return(self, group: int) -> bool:
        in_flight = self._busy(group, self.encodes_in_flight) + self._busy(group, self.backwards_in_flight)
        return in_flight < DEPTH

    def choose(self, round_: Round, blocked: Collection[int]) -> int | None:
        """The round's group, or that with the fewest orders in flight and none that waits for room; None: none may."""
        if round_.group is not None:
            return round_.group if self.may_encode(round_.group) and self._fits(round_, round_.group) else None
        busy = self.encodes_in_flight
        for num_orders in range(DEPTH):
            for group in self.groups:
                if self._busy(group, busy) != num_orders or group in self._without_room or group in blocked:
                    continue
                if self._fits(round_, group):
                    self._without_room.clear()
                    return group
                self._without_room.add(group)
        return None

    def reserve(self, rank: int, unit: UnitId, sizes: Sequence[int]) -> tuple[Address, ...]:
        """Room for a unit is taken, an encode is in flight; returns what its order tells the producer to free."""
        reserved = self.directory.reserve(self.owners[rank], unit, sizes)
        assert reserved, "room was checked before"
        self.encodes_in_flight[rank] += 1
        free, self.frees[rank] = tuple(self.frees[rank]), []
        return free

    def _fits(self, round_: Round, group: int) -> bool:
        owners = [self.owners[rank] for rank in ranks_of(group, self.shards)]
        return all(self.directory.room(owner, sizes) for owner, sizes in zip(owners, round_.sizes, strict=True))

    def _busy(self, group: int, in_flight: Sequence[int]) -> int:
        """Orders in flight to that rank of the group which has most."""
        return in_flight[group] if self.shards == 1 else max(in_flight[rank] for rank in ranks_of(group, self.shards))
