"""The ranks that are one data-parallel rank: what is sent to it goes to all, and all answer before it has. Pure.

    Flow ── PackOrder to consumer 1 ──▶ ranks 2 and 3 (t2) ── two answers ──▶ the first one's, when both are in

Packs, units and the pool know data-parallel ranks only; reductions, updates and checkpoints know every rank.

Invariant: answers of a rank to orders of one kind come in the order in which these were sent, so the n-th answers of
all peers belong together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from flowtrain.parallel.mesh import dp_rank, peers
from flowtrain.plan import Layout
from flowtrain.types import Role

SHARED_METHODS = frozenset({"encode", "train", "backward"})
"""Work of a data-parallel rank, told of once; every other method is answered by each rank for itself."""


class Peers:
    """`layouts`: of sides whose data-parallel ranks are several ranks each; ranks of other sides are their own."""

    def __init__(self, layouts: Mapping[Role, Layout]) -> None:
        self._layouts = {role: layout for role, layout in layouts.items() if layout.world_size > layout.dp_degree}
        self._answers: dict[tuple[Role, str, int], deque[Any]] = {}

    def ranks(self, role: Role, dp: int) -> tuple[int, ...]:
        """Where an order to a data-parallel rank goes."""
        layout = self._layouts.get(role)
        return (dp,) if layout is None else peers(layout, dp)

    def answered(self, role: Role, rank: int, method: str, value: Any) -> tuple[Any, ...]:
        """What of this answer is to be told: itself, the first peer's once all are in, or nothing yet."""
        layout = self._layouts.get(role)
        if layout is None or method not in SHARED_METHODS:
            return (value,)
        self._answers.setdefault((role, method, rank), deque()).append(value)
        waiting = [
            self._answers.get((role, method, peer), deque[Any]()) for peer in peers(layout, dp_rank(layout, rank))
        ]
        if not all(waiting):
            return ()
        return (*(answers.popleft() for answers in waiting),)[:1]
