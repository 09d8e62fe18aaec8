"""Parts that several policies share: dealing finished packs, and steps of given packs out of rows in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowtrain.packing.load import Bin, Load
from flowtrain.packing.policies.protocol import Draw, Slots
from flowtrain.packing.spec import CompositionSpec

Pour = Callable[[Draw, Sequence[Load]], list[Bin]]
"""Packs that hold all of these rows, however many it takes."""


def two_steps(spec: CompositionSpec) -> int:
    """Steps of rows that are looked at: two or more, of which those with the oldest rows are taken; where the rows of a
    step are given, those alone."""
    return max(2, spec.lookahead) if spec.step_packs is not None else 1


def dealt(draw: Draw, packs: Sequence[Bin]) -> Slots:
    """Packs to ranks in turn, empty ones at the end: every rank has the same number."""
    ranks = draw.num_ranks
    wanted = draw.num_packs or -(-len(packs) // ranks) * ranks
    filled = [*packs, *(draw.empty_pack() for _ in range(wanted - len(packs)))]
    return [filled[start : start + ranks] for start in range(0, wanted, ranks)]


def oldest_packs(draw: Draw, pour: Pour) -> list[Bin]:
    """The packs of a step: all that `num_rows` rows make, or those of the window that hold the oldest rows."""
    if draw.num_packs is None:
        return pour(draw, draw.loads[: draw.num_rows])
    packs = sorted(pour(draw, draw.loads), key=lambda pack: pack.first_position)
    return packs[: draw.num_packs]


def next_fit(draw: Draw, loads: Sequence[Load]) -> list[Bin]:
    """Rows in order; a pack is closed when the next row does not fit."""
    packs: list[Bin] = []
    guards = draw.caps.guards
    for load in loads:
        if not packs or (packs[-1].room - load.use) & guards != guards:
            packs.append(draw.empty_pack())
        packs[-1].add(load)
    return packs
