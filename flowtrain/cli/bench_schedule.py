"""The step that a mode's schedule makes of its own costs: no message, no wait for the controller, no noise (pure).

    trace of a run ──▶ seconds of every order, with its slots ──▶ rules of the mode ──▶ seconds of a step

| mode | a step |
|---|---|
| colocated | of the rank that has most: its encodes, packs and backwards; then sums and updates |
| `barrier_step` | all encodes, then all packs, then all backwards of each side's rank that has most |
| one producer, one consumer | a unit when its slot is due, a pack behind its units, a backward behind its pack |
| the same with `pool` and a frozen encoder | the side that has more |

A run whose step is longer than that loses time to something that is not its schedule; a baseline that does is a straw
man.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from flowtrain.runtime.exchange import EXCHANGES, Exchange
from flowtrain.telemetry.timeline import Call, Timeline

Work = list[tuple[tuple[int, ...], float]]
"""Orders of a kind in their order: slots and seconds."""

SUMS = ("reduce", "update")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a step and a rank: seconds of every order."""

    encodes: Work
    packs: Work
    backwards: Work
    ends: Mapping[str, float]

    @property
    def work(self) -> float:
        return sum(map(_total, (self.encodes, self.packs, self.backwards)))

    @property
    def all(self) -> float:
        return self.work + sum(self.ends.values())


def scheduled_seconds(
    timeline: Timeline, steps: Sequence[int], exchange: str, colocated: bool, frozen: bool
) -> float | None:
    """Mean seconds of these steps of the trace; None for a setup that is not in the table above."""
    found = [_step(list(_costs(timeline, index)), EXCHANGES[exchange], colocated, frozen) for index in steps]
    known = [seconds for seconds in found if seconds is not None]
    return fmean(known) if known and len(known) == len(found) else None


def _step(ranks: Sequence[tuple[str, Costs]], exchange: Exchange, colocated: bool, frozen: bool) -> float | None:
    sides: dict[str, list[Costs]] = defaultdict(list)
    for side, costs in ranks:
        sides[side].append(costs)
    producers, consumers = sides["producer"], sides["consumer"]
    if colocated:
        readers = sum(costs.all for costs in sides["reader"]) if len(consumers) == 1 else 0.0
        pairs = list(zip(producers, consumers, strict=True))
        # A sum ends everywhere at once: the rank that came last did not wait in it.
        sums = sum(min(costs.ends.get("reduce", 0.0) for costs in side) for side in (producers, consumers))
        updates = max(sum(costs.ends.get("update", 0.0) for costs in pair) for pair in pairs)
        return readers + max(one.work + other.work for one, other in pairs) + sums + updates
    if exchange.whole_steps:
        phases = ([c.encodes for c in producers], [c.packs for c in consumers], [c.backwards for c in producers])
        ends = max(sum(costs.ends.values()) for costs in (*producers, *consumers))
        return sum(max(map(_total, of_ranks)) for of_ranks in phases) + ends
    if (len(producers), len(consumers)) != (1, 1):
        return None
    if not exchange.within_step and frozen:
        return max(producers[0].all, consumers[0].all)
    return _in_pipeline(producers[0], consumers[0], exchange.slots_ahead)


def _total(work: Work) -> float:
    return sum(seconds for _, seconds in work)


def _in_pipeline(producer: Costs, consumer: Costs, ahead: int | None) -> float:
    """One producer and one consumer within a step; `ahead`: slots encoded beyond the first that is not done."""
    seconds = {slots[0]: cost for slots, cost in consumer.packs}
    order = [slots[0] for slots, _ in consumer.packs]
    encodes, backwards = list(producer.encodes), list(producer.backwards)
    left: dict[int, int] = defaultdict(int)
    for slots, _ in encodes:
        left[slots[0]] += 1
    ready: dict[int, float] = defaultdict(float)
    done: dict[int, float] = {}
    at, consumer_at = producer.ends.get("update", 0.0), consumer.ends.get("update", 0.0)

    def run_packs() -> None:
        nonlocal consumer_at
        while len(done) < len(order) and not left[slot := order[len(done)]]:
            consumer_at = max(consumer_at, ready[slot]) + seconds[slot]
            done[slot] = consumer_at

    def encode_from() -> float:
        if not encodes:
            return inf
        place = order.index(encodes[0][0][0])
        if ahead is None or place <= ahead:
            return at
        return max(at, done.get(order[place - ahead - 1], inf))

    def backward_from() -> float:
        return max(at, *(done.get(slot, inf) for slot in backwards[0][0])) if backwards else inf

    run_packs()
    while encodes or backwards:
        if encode_from() <= backward_from():
            begin, (slots, cost) = encode_from(), encodes.pop(0)
            left[slots[0]] -= 1
            ready[slots[0]] = at = begin + cost
            run_packs()
        else:
            begin, (_, cost) = backward_from(), backwards.pop(0)
            at = begin + cost
    return max(max(at, consumer_at) + producer.ends.get("reduce", 0.0), consumer_at + consumer.ends.get("reduce", 0.0))


def _costs(timeline: Timeline, step: int) -> Iterator[tuple[str, Costs]]:
    """Side and costs of every rank; an update at the beginning of a step counts to it."""
    window = timeline.step(step)
    assert window is not None, f"step {step} is not in the trace"
    begin, end = window
    for track in timeline.tracks:
        work: dict[str, Work] = defaultdict(list)
        ends: dict[str, float] = defaultdict(float)
        for call in track.calls:
            if begin <= call.start < end:
                if call.method in SUMS:
                    ends[call.method] += _seconds(call)
                else:
                    work[call.method].append((call.slots or (0,), _seconds(call)))
        # What a reader does has no slot; it counts where it shares the process.
        packs = work["train"] if track.side == "consumer" else work["read"]
        yield track.side, Costs(work["encode"], packs, work["backward"], ends)


def _seconds(call: Call) -> float:
    return (call.end - call.start) / 1e9
