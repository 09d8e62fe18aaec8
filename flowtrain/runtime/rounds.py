"""Rounds: the units that producers encode together (pure, contract C10).

Producers that each hold a piece of the encoder are a *group*: they encode a round together, one unit each, and run its
backwards together, since each call of the encoder is a collective of theirs. Otherwise a producer is its own group, and
a round is a unit.

Invariants: a round's units are of one slot, so that a pool with room for a slot has room for each of its rounds; rounds
come in the order of need of their first units, slot by slot; those of a group keep that order, and so do those that any
group may take.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowtrain.runtime.flow_state import StepKey
from flowtrain.types import EncodeUnit, SampleMeta, Step


@dataclass(frozen=True, slots=True)
class Round:
    """Units that the producers of a group encode together, by their place in it. `group` None: any may take it.

    `sizes`: payload bytes of each unit's samples.
    """

    key: StepKey
    units: tuple[EncodeUnit, ...]
    group: int | None
    sizes: tuple[Sequence[int], ...]


def ranks_of(group: int, shards: int) -> range:
    """The producers of a group."""
    return range(group * shards, (group + 1) * shards)


def rounds_of(
    step: Step, num_producers: int, shards: int, payload_bytes: Callable[[SampleMeta], int]
) -> Iterator[Round]:
    """The rounds of a step; `shards`: producers of a group, each of whom composition gives as many units of a slot."""
    key = (step.phase, step.index)

    def round_of(units: tuple[EncodeUnit, ...], group: int | None) -> Round:
        return Round(key, units, group, tuple([payload_bytes(sample) for sample in unit.samples] for unit in units))

    if shards == 1:
        yield from (round_of((unit,), unit.producer) for pack in step.packs for unit in pack.units)
        return
    for slot in step.slots:
        of_rank: list[list[EncodeUnit]] = [[] for _ in range(num_producers)]
        for pack in slot:
            for unit in pack.units:
                assert unit.producer is not None, f"unit {unit.id} has no producer, and producers work in groups"
                of_rank[unit.producer].append(unit)
        for group in range(num_producers // shards):
            members = of_rank[group * shards : (group + 1) * shards]
            yield from (round_of(units, group) for units in zip(*members, strict=True))


class Place(NamedTuple):
    """Where a round stands in the order of need, and the group whose it is."""

    number: int
    group: int | None


class RoundQueue:
    """Rounds that wait, those of each group apart: what has happened to one group needs no look at the others.

    Looked at are the heads of groups that were woken. Where one of them may not begin, none behind it in the order of
    need may: they wait at a *gate* until that one may.
    """

    def __init__(self) -> None:
        self._of_group: dict[int | None, deque[tuple[Place, Round]]] = defaultdict(deque)
        self._next = self._num_waiting = 0
        self._woken: set[int] = set()
        self._gate: tuple[Place, Round] | None = None
        self._gated: set[int] = set()

    def __len__(self) -> int:
        return self._num_waiting

    def extend(self, rounds: Iterable[Round]) -> None:
        """Rounds behind all others."""
        for round_ in rounds:
            queue = self._of_group[round_.group]
            if not queue and round_.group is not None:
                self._woken.add(round_.group)
            queue.append((Place(self._next, round_.group), round_))
            self._next += 1
            self._num_waiting += 1

    def wake(self, group: int) -> None:
        """Something has happened that its first round may have waited for, other than at the gate."""
        self._woken.add(group)

    def heads(self, may_start: Callable[[Round], bool]) -> list[Place]:
        """A heap of the rounds to look at: the first of those that any group may take, and of the groups woken."""
        if self._gate is not None and may_start(self._gate[1]):
            self._woken |= self._gated
            self._gate, self._gated = None, set()
        found = [queue[0][0] for group in (None, *self._woken) if (queue := self._of_group.get(group))]
        heapq.heapify(found)
        return found

    def at(self, place: Place) -> Round:
        """The round at the head of its group."""
        return self._of_group[place.group][0][1]

    def close(self, place: Place, behind: Iterable[Place]) -> None:
        """The round at the head of its group may not begin, so those behind it wait as well."""
        if self._gate is None or place < self._gate[0]:
            self._gate = (place, self.at(place))
        groups = {of.group for of in (place, *behind) if of.group is not None}
        self._gated |= groups
        self._woken -= groups

    def block(self, group: int) -> None:
        """The group's first round waits until the group is woken."""
        self._woken.discard(group)

    def take(self, place: Place, heads: list[Place]) -> None:
        """The round at the head of its group goes; the next one of the group joins the heads."""
        queue = self._of_group[place.group]
        queue.popleft()
        self._num_waiting -= 1
        if queue:
            heapq.heappush(heads, queue[0][0])

    def before(self, place: Place) -> set[int]:
        """Groups of which a round waits that is needed before this one."""
        return {g for g, queue in self._of_group.items() if g is not None and queue and queue[0][0] < place}

    def oldest(self) -> Round | None:
        """The round that is needed first."""
        heads = [queue[0] for queue in self._of_group.values() if queue]
        return min(heads, key=lambda head: head[0].number)[1] if heads else None
