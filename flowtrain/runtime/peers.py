"""The ranks that are one data-parallel rank: what is sent to it goes to all, and all answer before it has. Pure.

    Flow ── PackOrder to consumer 1 ──▶ ranks 2 and 3 (t2) ── two answers ──▶ the first one's, when both are in

Packs, units and the pool know data-parallel ranks only; reductions, updates and checkpoints know every rank.

An order to train may be answered with several packs, or with none yet (`flowtrain.pipeline`). The loss of a pack is
told by the peers with the last layers, the slowest says how long it took, and what they read is added up.

Invariant: answers of a rank on one kind of work come in the order in which it was sent, so the n-th answers of all
peers belong together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowtrain.messages import PackTrained
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
        values = value if method == "train" else (value,)
        layout = self._layouts.get(role)
        if layout is None or method not in SHARED_METHODS:
            return tuple(values)
        self._answers.setdefault((role, method, rank), deque()).extend(values)
        waiting = [
            self._answers.get((role, method, peer), deque[Any]()) for peer in peers(layout, dp_rank(layout, rank))
        ]
        told = []
        while all(waiting):
            told.append(_together([answers.popleft() for answers in waiting]))
        return tuple(told)


def _together(answers: Sequence[Any]) -> Any:
    """One answer of all peers, which are in the order of their ranks: those with the last layers come last."""
    first, last = answers[0], answers[-1]
    if not isinstance(first, PackTrained):
        return first
    read: Counter[str] = Counter()
    for answer in answers:
        read.update(answer.pool.bytes_out)
    return replace(
        first,
        loss_sum=last.loss_sum,
        trained_tokens=last.trained_tokens,
        seconds=max(answer.seconds for answer in answers),
        pool=replace(first.pool, bytes_out=dict(read)),
    )
