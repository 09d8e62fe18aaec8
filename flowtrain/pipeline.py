"""A backbone as a pipeline: which layers a rank computes, in which order it takes packs, how many are under way (pure).

The layers are cut into *sections*, runs of neighbouring layers; the first has the embedding, the last the head. Rank s
of P holds section s, or with V sections a rank (interleaved) the sections s, s + P, s + 2P …

    P = 2, V = 1, four packs            rank 0   F0 F1 B0 F2 B1 F3 B2 B3
    F forward, B backward               rank 1      F0 B0 F1 B1 F2 B2 F3 B3

This is 1F1B: after as many forwards as it takes until the first gradient is back, one forward and one backward in turn.
With V > 1 a rank runs P packs through one of its sections before it goes on with the next one.

Packs come one by one, as their features are there: a rank goes through its work up to the first pack that it lacks.

Invariants: every section sees the packs in order, forward and backward, so sums of gradients have one order; between
two ranks, what one sends forward (or backward) the other takes in the same order; with `Layout.packs_held` packs at
hand a rank always gets to the end of the oldest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Section:
    """Layers `start` … `stop` - 1 of the backbone.

    Attributes:
        number: its place in the pipeline.
        is_first: it embeds tokens and features.
        is_last: it has the last norm and the head, and computes the loss.
    """

    start: int
    stop: int
    number: int = 0
    is_first: bool = True
    is_last: bool = True


class Work(NamedTuple):
    """A forward or backward of the pack in `slot` through the rank's own section of this index."""

    forward: bool
    section: int
    slot: int


def cut_sections(costs: Sequence[float], head: float, num: int) -> tuple[Section, ...]:
    """The cut into `num` sections, each of a layer at least, whose dearest section is cheapest.

    Args:
        costs: of each layer, in one unit with `head`, which the last section bears.

    >>> [(s.start, s.stop) for s in cut_sections([1, 1, 1, 1], 2, 2)]
    [(0, 3), (3, 4)]
    """
    assert 1 <= num <= len(costs), f"{len(costs)} layers for {num} sections"
    sums = [0.0, *accumulate(costs)]
    # least[stop]: (dearest of the sections so far, where the last of them begins), for as many sections as were added
    least: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for number in range(1, num + 1):
        extra = head if number == num else 0.0
        stops = [len(costs)] if number == num else range(number, len(costs) - (num - number) + 1)
        least.append(
            {
                stop: min(
                    (max(before, sums[stop] - sums[at] + extra), -at)
                    for at, (before, _) in least[-1].items()
                    if at < stop
                )
                for stop in stops
            }
        )
    bounds = [len(costs)]
    for stops_of in reversed(least[1:]):
        bounds.append(-int(stops_of[bounds[-1]][1]))
    bounds.reverse()
    assert sorted(set(bounds) | {0, len(costs)}) == bounds, f"{len(costs)} layers cut at {bounds}"
    return tuple(
        Section(start, stop, number, number == 0, number == num - 1)
        for number, (start, stop) in enumerate(pairwise(bounds))
    )


def own_sections(sections: Sequence[Section], rank: int, ranks: int) -> tuple[Section, ...]:
    """Those of a rank of the pipeline."""
    return tuple(sections[rank::ranks])


def sections_text(sections: Sequence[Section], ranks: int) -> str:
    """Who has which layers, all of them.

    >>> sections_text(cut_sections([1, 1, 1, 1], 2, 2), 2)
    'the pipeline has all 4 layers: 0-2 on rank 0, 3-3 on rank 1'
    """
    told = ", ".join(f"{s.start}-{s.stop - 1} on rank {s.number % ranks}" for s in sections)
    return f"the pipeline has all {sum(s.stop - s.start for s in sections)} layers: {told}"


def schedule(rank: int, ranks: int, sections: int, packs: int) -> list[Work]:
    """All work of a step on one rank, in order; `sections`: of each rank.

    1. The forwards and the backwards are each in a fixed order: P packs through the first own section (the last one for
       backwards), the same through the next, then the next P packs.
    2. A rank begins with the forwards that are on their way when its first gradient arrives.
    3. Then a forward and a backward in turn, and at last the backwards that are left.

    Where P does not divide the packs, this is the order for the next multiple, without the packs that are not there.
    """
    whole = -(-packs // ranks) * ranks
    forwards, backwards = (list(_order(ranks, sections, whole, forward)) for forward in (True, False))
    ahead = ranks - 1 - rank
    if sections > 1:
        ahead = 2 * ahead + (sections - 1) * ranks
    ahead = min(ahead, len(forwards))
    work = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        work += [forward, backward]
    work += backwards[len(forwards) - ahead :]
    return [step for step in work if step.slot < packs]


def _order(ranks: int, sections: int, packs: int, forward: bool) -> Iterator[Work]:
    through = range(sections) if forward else range(sections - 1, -1, -1)
    for first in range(0, packs, ranks):
        for section in through:
            yield from (Work(forward, section, slot) for slot in range(first, first + ranks))
