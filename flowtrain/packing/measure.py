"""How well composed steps use the ranks, one figure each for the three ways in which ranks wait for one another.

| figure | ranks meet | of one step |
|---|---|---|
| `step` | at its end | dearest rank / mean rank |
| `lock_step` | in every slot | Σ over slots of the dearest pack / mean rank |
| `microbatch` | in every beat of a pipeline | dearest pack / mean pack |

`utilisation` joins balance and fill: useful cost / (ranks · Σ over slots of (dearest pack + overhead)), `overhead`
being what a microbatch costs however little it holds. A row waits from the step in which it entered the window to the
one that trains it. Costs are those of the packs, whole numbers; 1 is perfect everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from flowtrain.packing.bounds import dearest_pack, lock_step
from flowtrain.packing.cost import CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import Step


@dataclass(frozen=True, slots=True)
class Measures:
    """Means over steps; `worst_*` the worst of any step."""

    steps: int
    packs: int
    packs_per_rank: float
    empty_packs: int
    fill: float
    step: float
    lock_step: float
    microbatch: float
    worst_step: float
    worst_lock_step: float
    worst_microbatch: float
    lock_step_bound: float
    microbatch_bound: float
    utilisation: float
    encode_imbalance: float
    longest_wait: int
    mean_wait: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def imbalances(costs: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """(step, lock-step, microbatch) of one step; `costs[slot][rank]`.

    >>> imbalances([[3, 1], [1, 3]])
    (1.0, 1.5, 1.5)
    """
    total = sum(map(sum, costs))
    if not total:
        return 1.0, 1.0, 1.0
    num_ranks, num_packs = len(costs[0]), sum(map(len, costs))
    dearest = [max(slot) for slot in costs]
    ranks = [sum(slot[rank] for slot in costs) for rank in range(num_ranks)]
    return max(ranks) * num_ranks / total, sum(dearest) * num_ranks / total, max(dearest) * num_packs / total


def measure(steps: Sequence[Step], spec: CompositionSpec, overhead: int = 0, cost: CostModel | None = None) -> Measures:
    """Figures of these steps. Leave out what the end of the data cut short, where that is not to count.

    `*_bound`: the least that any packing of a step's rows into as many packs can reach; 1 without `cost`.
    """
    assert steps, "no steps to measure"
    bounds = [bounds_of(step, cost) if cost is not None else (1.0, 1.0) for step in steps]
    found = [imbalances([[pack.cost for pack in slot] for slot in step.slots]) for step in steps]
    useful = sum(pack.cost for step in steps for pack in step.packs)
    spent = sum((max(pack.cost for pack in slot) + overhead) * len(slot) for step in steps for slot in step.slots)
    packs = [pack for step in steps for pack in step.packs]
    waits = row_waits(steps)
    encode = [load for step in steps if (load := producer_imbalance(step, spec.num_producers)) is not None]
    return Measures(
        steps=len(steps),
        packs=len(packs),
        packs_per_rank=fmean(len(step.slots) for step in steps),
        empty_packs=sum(not pack.samples for pack in packs),
        fill=sum(pack.tokens for pack in packs) / (len(packs) * spec.max_tokens),
        step=fmean(figure[0] for figure in found),
        lock_step=fmean(figure[1] for figure in found),
        microbatch=fmean(figure[2] for figure in found),
        worst_step=max(figure[0] for figure in found),
        worst_lock_step=max(figure[1] for figure in found),
        worst_microbatch=max(figure[2] for figure in found),
        lock_step_bound=fmean(bound[0] for bound in bounds),
        microbatch_bound=fmean(bound[1] for bound in bounds),
        utilisation=useful / spent if spent else 1.0,
        encode_imbalance=fmean(encode) if encode else 1.0,
        longest_wait=max(waits, default=0),
        mean_wait=fmean(waits) if waits else 0.0,
    )


def bounds_of(step: Step, cost: CostModel) -> tuple[float, float]:
    """(lock-step, microbatch) that no packing of the step's rows can beat; the fixed cost of packs left aside."""
    costs = [cost.sample_cost(sample) for sample in step.samples]
    total, num_packs = sum(costs), len(step.packs)
    if not total:
        return 1.0, 1.0
    ranks = num_packs // len(step.slots)
    return lock_step(costs, ranks, len(step.slots)) * ranks / total, dearest_pack(costs, num_packs) * num_packs / total


def row_waits(steps: Iterable[Step]) -> list[int]:
    """Steps that each row was in the window before the one that trains it.

    A row entered for the first step whose cursor lies behind its position.
    """
    ordered = sorted(steps, key=lambda step: step.index)
    cursors = [step.cursor for step in ordered]
    return [
        number - min(number, bisect_right(cursors, sample.position))
        for number, step in enumerate(ordered)
        for sample in step.samples
    ]


def producer_imbalance(step: Step, num_producers: int) -> float | None:
    """Busiest / mean producer by predicted encoder cost; None where units have no producer or nothing is encoded.

    The cost of a unit is its share of its pack's, by patches.
    """
    work = [0] * num_producers
    for pack in step.packs:
        patches = sum(unit.patches for unit in pack.units)
        for unit in pack.units:
            if unit.producer is None:
                return None
            work[unit.producer] += pack.encode_cost * unit.patches // max(patches, 1)
    return max(work) * num_producers / sum(work) if sum(work) else None
