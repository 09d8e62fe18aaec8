"""Which node each process runs on (pure, contract C10).

    needs of the two sides + room of each node ──place──▶ node of every rank

1. A side with a node of its own in the config goes there, whole.
2. Of all ways in which no side is split, the one that stays nearest to the driver's node (number 0): everything on it
   when it fits, else the consumers on the lower number.
3. A side that fits no single node is spread: its ranks fill the nodes in their order, tensor-parallel groups whole.
   The other side stays whole if it can.

Invariants: no node is given more than its room; a side is split only when no placement keeps it whole, and a group
never; the result depends on the numbers only. Room that is unknown (`nodes` None: no cluster was asked) is unbounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from flowtrain.errors import PlanError
from flowtrain.types import Role

MAX_TOLD = 8
"""Nodes that a refusal lists."""

Homes = dict[Role, tuple[int, ...]]
"""The node of each rank of a side."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What one node of the cluster has, free or not; `name` is its address, `gpu` what its GPUs are."""

    name: str
    cpus: float
    gpus: float
    memory_bytes: float = 0.0
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """`num` processes of one side, each with so many cores and GPUs; `node`: where the config wants them; `group`: so
    many neighbours stay on one node."""

    role: Role
    num: int
    cpus: float
    gpus: float
    node: int | None = None
    group: int = 1


def place(needs: Sequence[Need], nodes: Sequence[NodeRoom] | None) -> Homes:
    """See the module's page; `needs` in the order of preference for low numbers.

    Raises:
        PlanError: no way fits; the sentence has what was asked and what each node has.
    """
    if nodes is None:
        return {need.role: (need.node or 0,) * need.num for need in needs}
    for need in needs:
        if need.node is not None and need.node >= len(nodes):
            raise PlanError(
                f"{need.role}s.node is {need.node} and the cluster has {len(nodes)} nodes, numbered from 0 "
                f"({describe_rooms(nodes)}): set it to one of them"
            )
    for homes in _ways(needs, nodes):
        if homes is not None:
            return homes
    asked = "; ".join(
        f"{need.num} {need.role}s with {_amount(need.cpus, need.gpus)} each{_together(need)}{_at(need)}"
        for need in needs
    )
    raise PlanError(
        f"the plan asked for {asked}; available per node: {describe_rooms(nodes)}: lower `num` or `threads`, "
        f"or set cluster.oversubscribe: true"
    )


def _ways(needs: Sequence[Need], nodes: Sequence[NodeRoom]) -> Iterator[Homes | None]:
    """Placements by preference: none split, one split, all split; None where one does not fit."""
    distinct = _distinct(nodes)
    options = [[need.node] if need.node is not None else distinct for need in needs]
    for choice in sorted(product(*options), key=lambda numbers: (max(numbers), numbers)):
        yield _fill(needs, nodes, dict(zip((need.role for need in needs), choice, strict=True)))
    for whole, places in zip(needs, options, strict=True):
        for number in places:
            yield _fill(needs, nodes, {whole.role: number})
    yield _fill(needs, nodes, {})


def _fill(needs: Sequence[Need], nodes: Sequence[NodeRoom], whole: Mapping[Role, int]) -> Homes | None:
    """Sides in `whole` on their node, then the others rank by rank on the first node with room."""
    cpus, gpus = [node.cpus for node in nodes], [node.gpus for node in nodes]
    homes: Homes = {}
    for need in sorted(needs, key=lambda need: need.role not in whole):
        if need.role in whole:
            candidates: Iterable[int] = [whole[need.role]]
        else:
            candidates = range(len(nodes)) if need.node is None else [need.node]
        placed: list[int] = []
        for number in candidates:
            group_cpus, group_gpus = need.cpus * need.group, need.gpus * need.group
            while len(placed) < need.num and cpus[number] >= group_cpus and gpus[number] >= group_gpus:
                cpus[number] -= group_cpus
                gpus[number] -= group_gpus
                placed += [number] * need.group
        if len(placed) < need.num:
            return None
        homes[need.role] = tuple(placed)
    return homes


def _distinct(nodes: Sequence[NodeRoom]) -> list[int]:
    """The first two nodes of each size: two sides cannot tell further ones apart."""
    seen: dict[tuple[float, float], int] = {}
    kept = []
    for number, node in enumerate(nodes):
        size = (node.cpus, node.gpus)
        seen[size] = seen.get(size, 0) + 1
        if seen[size] <= 2:
            kept.append(number)
    return kept


def describe_rooms(nodes: Sequence[NodeRoom]) -> str:
    """What each node has, in words."""
    told = [f"node {n} ({node.name}) {_amount(node.cpus, node.gpus)}" for n, node in enumerate(nodes[:MAX_TOLD])]
    return ", ".join(told) + (f" and {len(nodes) - MAX_TOLD} more" if len(nodes) > MAX_TOLD else "")


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _together(need: Need) -> str:
    return "" if need.group == 1 else f", {need.group} together on a node (tensor parallel)"


def _at(need: Need) -> str:
    return "" if need.node is None else f" on node {need.node}"
