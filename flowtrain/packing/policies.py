"""How a step is taken out of a window of rows: one function a policy, and the dict that names them.

A policy gets the window in position order and returns slots of packs of samples, `result[slot][rank]`; rows that it
leaves out are carried to the next step. It takes exactly `step_samples` rows, or all that are left when there are
fewer; with `step_packs` it makes exactly that many packs a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowtrain.packing.balance import Bin, Bounds, Load, improve, johnson, slots_of, spread
from flowtrain.packing.cost import CostModel
from flowtrain.packing.spec import CompositionSpec
from flowtrain.types import SampleMeta

Slots = list[list[list[SampleMeta]]]
Policy = Callable[[Sequence[SampleMeta], CompositionSpec, CostModel, int], Slots]


def arrival(window: Sequence[SampleMeta], spec: CompositionSpec, cost: CostModel, cursor: int) -> Slots:
    """Rows in order; a pack is closed when the next row does not fit; packs are dealt to the ranks in turn."""
    bounds = _bounds(spec)
    packs: list[Bin] = []
    for load in _loads(window[: spec.step_samples], spec, cost):
        if not packs or not packs[-1].has_room(load, bounds):
            if spec.step_packs is not None and len(packs) == spec.step_packs * spec.num_consumers:
                break
            packs.append(Bin())
        packs[-1].add(load)
    num_slots = spec.step_packs or -(-len(packs) // spec.num_consumers)
    packs += [Bin() for _ in range(num_slots * spec.num_consumers - len(packs))]
    return _samples([packs[start : start + spec.num_consumers] for start in range(0, len(packs), spec.num_consumers)])


def dynamic(window: Sequence[SampleMeta], spec: CompositionSpec, cost: CostModel, cursor: int) -> Slots:
    """Rows chosen so that steps are alike, packs of equal cost, slots in the order that hides encoding."""
    bounds, num_ranks = _bounds(spec), spec.num_consumers
    loads = _loads(window, spec, cost)
    if spec.step_packs is None:
        chosen = choose(loads, spec, cursor)
        bins = _fewest_packs(chosen, num_ranks, bounds)
    else:
        taken = _first_fit(loads, spec.step_packs * num_ranks, bounds)
        chosen = [load for pack in taken for load in pack.loads]
        bins = spread(chosen, spec.step_packs * num_ranks, bounds) or taken
    improve(bins, bounds)
    slots = slots_of(bins, num_ranks)
    stages = []
    for slot in slots:
        encode = sum(cost.encode_cost(load.sample for load in pack.loads) for pack in slot) / num_ranks
        stages.append((encode, max(pack.cost for pack in slot)))
    return _samples([slots[number] for number in johnson(stages)])


POLICIES: dict[str, Policy] = {"arrival": arrival, "dynamic": dynamic}
"""Name in `packing.policy` → function."""


def choose(loads: Sequence[Load], spec: CompositionSpec, cursor: int) -> list[Load]:
    """The rows of a step, out of a window in position order.

    1. Rows whose turn in order of arrival was `lookahead` or more steps ago, oldest first.
    2. The rest sorted by cost and cut into as many strata as rows are missing; the oldest row of each stratum. So
       every step has its share of dear rows, and its cost is near the mean.
    """
    num_rows = spec.step_samples
    assert num_rows is not None, "a step of packs chooses its rows while it fills them"
    overdue = cursor - (2 * spec.lookahead - 1) * num_rows
    chosen = [load for load in loads if load.sample.position < overdue][:num_rows]
    rest = sorted(loads[len(chosen) :], key=lambda load: (load.cost, load.sample.position))
    missing = min(num_rows - len(chosen), len(rest))
    for number in range(missing):
        stratum = rest[number * len(rest) // missing : (number + 1) * len(rest) // missing]
        chosen.append(min(stratum, key=lambda load: load.sample.position))
    return chosen


def _fewest_packs(loads: Sequence[Load], num_ranks: int, bounds: Bounds) -> list[Bin]:
    """The fewest slots of packs that hold the rows; ends at one row a pack at the latest."""
    tokens = sum(load.tokens for load in loads)
    vision_bytes = sum(load.vision_bytes for load in loads)
    num_slots = max(1, -(-tokens // (num_ranks * bounds.tokens)), -(-vision_bytes // (num_ranks * bounds.vision_bytes)))
    while (bins := spread(loads, num_slots * num_ranks, bounds)) is None:
        num_slots += 1
    return bins


def _first_fit(loads: Sequence[Load], num_packs: int, bounds: Bounds) -> list[Bin]:
    """Rows in order, each into the first pack with room; those without are left out. The oldest always get in."""
    bins = [Bin() for _ in range(num_packs)]
    for load in loads:
        pack = next((pack for pack in bins if pack.has_room(load, bounds)), None)
        if pack is not None:
            pack.add(load)
    return bins


def _loads(samples: Sequence[SampleMeta], spec: CompositionSpec, cost: CostModel) -> list[Load]:
    return [Load(cost.sample_cost(s), s.tokens, spec.vision_bytes(s), s) for s in samples]


def _bounds(spec: CompositionSpec) -> Bounds:
    return Bounds(spec.max_tokens, spec.max_pack_vision_bytes)


def _samples(slots: Sequence[Sequence[Bin]]) -> Slots:
    """Samples of each pack in position order."""
    return [[sorted((load.sample for load in p.loads), key=lambda s: s.position) for p in slot] for slot in slots]
