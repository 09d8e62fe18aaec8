"""Lifetimes of blocks: recorded from runs or random, and replayed in an arena at a chosen load.

    RUN_DIR/pool.csv (`debug.pool_journal`) ──read_journal──▶ Lifetimes, one for each owner ──replay──▶ failures

*Load* is the most live bytes at once over the capacity. A *failure* is an allocation that finds no place.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arenas import LINE, Arena
from flowtrain.pool.address import owner_of
from flowtrain.types import Address

MIN_LARGEST = 64
"""A segment has at least this many times the bytes of its largest block."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """What one owner's segment saw, in order.

    Attributes:
        name: run and owner.
        events: a block's bytes where it is reserved; -1 - i where the i-th block reserved is freed.
    """

    name: str
    events: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        return [event for event in self.events if event > 0]

    @property
    def peak_bytes(self) -> int:
        """Most live bytes at once."""
        sizes, live, peak = self.sizes, 0, 0
        for event in self.events:
            live += event if event > 0 else -sizes[-1 - event]
            peak = max(peak, live)
        return peak

    def capacity(self, load: float) -> int:
        """Bytes of a segment in which these lifetimes reach this load, or less where the largest block forbids it."""
        return max(round(self.peak_bytes / load), MIN_LARGEST * max(self.sizes))


def read_journal(path: Path, name: str) -> list[Lifetimes]:
    """The lifetimes in a run's pool.csv, one for each owner."""
    events: dict[int, list[int]] = {}
    reserved: dict[int, int] = {}
    index: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            owner = owner_of(Address(int(row["address"])))
            if row["event"] == "reserve":
                index[row["address"]] = reserved.get(owner, 0)
                reserved[owner] = reserved.get(owner, 0) + 1
                events.setdefault(owner, []).append(int(row["bytes"]))
            elif row["event"] == "free":
                events[owner].append(-1 - index.pop(row["address"]))
    return [Lifetimes(f"{name}/{owner}", tuple(of_owner)) for owner, of_owner in sorted(events.items())]


def write_lifetimes(path: Path, lifetimes: Iterable[Lifetimes]) -> None:
    """One line for each segment: its name, then its events with sizes in lines of 64 bytes."""
    with path.open("w", encoding="utf-8") as file:
        for one in lifetimes:
            numbers = (event // LINE if event > 0 else event for event in one.events)
            file.write(f"{one.name} {' '.join(map(str, numbers))}\n")


def read_lifetimes(path: Path) -> list[Lifetimes]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, *numbers = line.split()
        found.append(Lifetimes(name, tuple(int(n) * LINE if int(n) > 0 else int(n) for n in numbers)))
    return found


def random_lifetimes(seed: int, sizes: list[int], num_blocks: int, live_blocks: int) -> Lifetimes:
    """Each new block comes with the end of one chosen at random, once `live_blocks` are there."""
    dice = random.Random(seed)
    events: list[int] = []
    live: list[int] = []
    for number in range(num_blocks):
        if len(live) == live_blocks:
            at = dice.randrange(live_blocks)
            events.append(-1 - live[at])
            live[at] = live[-1]
            live.pop()
        events.append(dice.choice(sizes))
        live.append(number)
    return Lifetimes(f"random-{seed}", tuple(events))


def replay(lifetimes: Lifetimes, arena: Arena) -> int:
    """Allocations that failed; a block that found no place is left out, and so is its end."""
    places: list[int | None] = []
    failures = 0
    for event in lifetimes.events:
        if event > 0:
            places.append(arena.allocate(event))
            failures += places[-1] is None
        elif (place := places[-1 - event]) is not None:
            arena.free(place)
    return failures


def first_failing_load(lifetimes: Lifetimes, make: Callable[[int], Arena], loads: Iterable[float]) -> float | None:
    """The lowest of these loads at which an allocation fails; None when none does."""
    return next((load for load in loads if replay(lifetimes, make(lifetimes.capacity(load)))), None)
