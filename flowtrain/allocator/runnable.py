"""What of the search space `launch` runs: a space for each placement, of which the best plan is taken (pure).

| space | what launch asks for |
|---|---|
| disaggregated | layouts of `check_layout` (1) |
| colocated | as many whole copies of both sides; on a CPU a space for each number of threads of a process |

(1) A backbone with layers that are no attention is copied whole, and so is an encoder whose number may change
(`allocation.replan`).

A *space* is a problem's placements with a scope. What no space has (placements that are mixed, colocated modules that
are cut) can be planned for only: `everything`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.bound import SIDES
from flowtrain.allocator.candidates import Scope, Side, thread_counts
from flowtrain.allocator.options import MemoryModel
from flowtrain.allocator.policies import Policy
from flowtrain.allocator.solve import TIE, Problem, Solution
from flowtrain.plan import Layout
from flowtrain.shapes import Mixer, ModelShape
from flowtrain.types import Role


@dataclass(frozen=True, slots=True)
class Space:
    placements: frozenset[str]
    scope: Scope

    def of(self, problem: Problem) -> Problem:
        """The problem with these placements only."""
        return replace(problem, placements=self.placements)


def everything(problem: Problem, scope: Scope) -> tuple[Space, ...]:
    """One space, of what can be planned."""
    return (Space(problem.placements, scope),)


def runnable(
    problem: Problem, scope: Scope, shape: ModelShape, replan: bool, copies: bool = False
) -> tuple[Space, ...]:
    """The spaces of what launch runs within `scope`.

    `replan`: the number of producers may change while it runs; `copies`: no module is cut.
    """
    spaces = []
    if "disaggregated" in problem.placements:
        recurrent = bool(shape.text.layers_with(Mixer.RECURRENT))
        whole = {Role.PRODUCER: copies or replan, Role.CONSUMER: copies or recurrent}
        apart = {role: _copies(side, whole[role]) for role, side in _of(scope)}
        spaces.append(Space(frozenset({"disaggregated"}), _with(scope, apart)))
    sides = dict(_of(scope))
    given = [side.layout for side in sides.values() if side.layout is not None]
    copied = all(layout == Layout(dp_replicate=layout.world_size) for layout in given) and len(set(given)) < 2
    if "colocated" in problem.placements and copied:
        # With one layout given, the other side has to follow.
        of_both = given[0] if given else None
        most = max((side.threads for side in sides.values() if side.threads is not None), default=None)
        for threads in sorted({number for pool in problem.cluster for number in thread_counts(pool, most)}):
            same = {r: replace(_copies(s, True), layout=of_both, threads=threads) for r, s in sides.items()}
            spaces.append(Space(frozenset({"colocated"}), _with(scope, same)))
    return tuple(spaces)


def _of(scope: Scope) -> list[tuple[Role, Side]]:
    return [(role, scope.side(role)) for role in SIDES]


def _with(scope: Scope, sides: dict[Role, Side]) -> Scope:
    return replace(scope, producers=sides[Role.PRODUCER], consumers=sides[Role.CONSUMER])


def _copies(side: Side, whole: bool) -> Side:
    return replace(side, copies_only=whole and side.layout is None)


def search_spaces(
    problem: Problem, memory: MemoryModel, policy: Policy, spaces: Sequence[Space]
) -> list[tuple[Space, Solution]]:
    """The best plan of each space that has one, the best of all first."""
    found = [(space, plan) for space in spaces if (plan := policy(space.of(problem), memory, space.scope)) is not None]
    return sorted(found, key=lambda one: _Rank(one[1]))


@dataclass(frozen=True, slots=True)
class _Rank:
    """Rate first; of equal rates fewer devices."""

    plan: Solution

    def __lt__(self, other: _Rank) -> bool:
        ours, theirs = self.plan, other.plan
        if abs(ours.rate - theirs.rate) > TIE * max(ours.rate, theirs.rate):
            return ours.rate > theirs.rate
        return ours.devices < theirs.devices
