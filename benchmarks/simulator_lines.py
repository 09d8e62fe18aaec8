"""Calibration of the simulator for `benchmarks.simulator`: what orders take, as lines in what they hold.

    orders of calibration runs ─▶ lines of encodes, backwards, packs ┐
    the same where ranks overlapped ─▶ speed of busy cores           │
    a run of two producers ─▶ the sum of their gradients             ├─▶ Calibration ─▶ simulated samples/s of any run
    traces of the controller ─▶ a message, an answer, a row read     ┘

Cores are a resource: a line holds the seconds of an order that runs alone, and `together` how fast a rank is while the
other core is busy, too; more ranks than cores take turns, to which nothing is fitted. Both are found by turns: the
lines from orders whose shared seconds count `together` times, `together` as what makes shared seconds agree with the
lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from flowtrain.packing import CostModel
from flowtrain.packing.fit import LineFit
from flowtrain.simulator import Control, Cores, Simulation, System
from flowtrain.simulator.timing import StepSeconds
from flowtrain.types import Role, Step

if TYPE_CHECKING:
    from benchmarks.timed_runs import TimedRun

WARM_UP = 3
"""First calls of each kind and run that nothing is fitted to."""

ROUNDS = 6
LEAST_TOGETHER = 0.4
SIDES = (Role.PRODUCER, Role.CONSUMER)
PRODUCER = ("patch", "patch_pair", "unit")
CONSUMER = ("token", "token_pair", "trained_token", "projected_patch", "pack")

Lines = Mapping[str, Sequence[float]]
"""Seconds of each feature, by kind of order."""


@dataclass(frozen=True, slots=True)
class Order:
    """`features` are those of `flowtrain.packing.fit`; `seconds[k]`: while k other ranks were at work as well."""

    kind: str
    features: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """`encode`, `backward` (None: no gradient returns) and `pack` are cost models in seconds; `reduce`: seconds of the
    sum of gradients over a side of so many ranks, `update`: of the optimizer on a rank; `read_seconds`: of a row,
    `taking_seconds`: of the controller for an answer, beside sending orders to other processes."""

    encode: CostModel
    backward: CostModel | None
    pack: CostModel
    reduce: Mapping[tuple[Role, int], float]
    update: Mapping[Role, float]
    cores: Cores
    control: Control
    read_seconds: float
    taking_seconds: float

    def rate(self, run: TimedRun, skipped: int) -> float:
        """Simulated rows a second of the middle step of a run to come, its first ones left out."""
        plan, inputs, config = run.plan, run.inputs, run.config
        one_process = plan.placement == "colocated"
        producers, consumers = len(plan.producers.ranks), len(plan.consumers.ranks)
        num_devices = consumers if one_process else producers + consumers
        system = System.of_run(inputs, num_devices, Control(0.0, 0.0) if one_process else self.control, self.cores)
        steps = Simulation(system, Seconds(self, system), run.steps()).run(config.train.max_steps or 1).steps
        steady = pairwise(steps[skipped - 1 :])
        return median(step.rows / (step.end - before.end) for before, step in steady)

    def drift(self, run: TimedRun) -> float:
        """How much longer than by these lines the packs of a run took, all together."""
        orders = run.packs()[WARM_UP:]
        real = self.pack.coefficients()
        told = sum(real[name] * held for order in orders for name, held in zip(CONSUMER, order.features, strict=True))
        return sum(_alone(order, self.cores) for order in orders) / told - 1.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """A `Timing` by a calibration. In one process nothing overlaps and nothing is sent: an order takes the controller's
    part of it as well, and a pack the reading of as many rows."""

    by: Calibration
    system: System

    def of(self, step: Step) -> StepSeconds:
        by = self.by
        answer, read = (by.taking_seconds, by.read_seconds) if self.system.colocated else (0.0, 0.0)
        encode, backward = {}, {}
        for unit in (unit for pack in step.packs for unit in pack.units):
            encode[unit.id] = by.encode.real(by.encode.unit_cost(unit.samples)) + answer
            backward[unit.id] = 0.0
            if by.backward is not None:
                backward[unit.id] = by.backward.real(by.backward.unit_cost(unit.samples)) + answer
        packs = [
            [by.pack.real(by.pack.pack_cost(pack.samples)) + answer + read * len(pack.samples) for pack in slot]
            for slot in step.slots
        ]
        return StepSeconds(encode, backward, packs, [0.0] * len(packs[0]))

    def reduce_seconds(self, role: Role) -> float:
        ranks = self.system.members(role)
        assert (role, ranks) in self.by.reduce, f"no calibration run has summed gradients over {ranks} {role}s"
        return self.by.reduce[role, ranks]

    def update_seconds(self, role: Role) -> float:
        return self.by.update[role]


def calibrate(settings: Mapping[str, Sequence[TimedRun]], cores: int | None = None) -> dict[str, Calibration]:
    """Of each setting, from its runs of one producer and one consumer, some of which leave the sides no time at the
    same moment. Lines are a setting's own, the cores are the machine's: all runs say how fast they are. Of its runs of
    more producers nothing but the ends of steps is used."""
    all_runs = settings
    settings = {name: [run for run in runs if run.num_ranks(Role.PRODUCER) == 1] for name, runs in settings.items()}
    bases = {name: runs[0].cost for name, runs in settings.items()}
    orders = {name: _orders(runs) for name, runs in settings.items()}
    lines, speed = fit(bases, orders, cores or os.cpu_count() or 1)
    found = {}
    for name, runs in settings.items():
        models = {
            kind: _model(bases[name], kind, with_interruptions(line, orders[name][kind], speed))
            for kind, line in lines[name].items()
        }
        found[name] = Calibration(
            models["encode"],
            models.get("backward"),
            models["pack"],
            *_ends(all_runs[name], speed),
            speed,
            _control(runs),
            _read_seconds(runs, speed),
            _controller_seconds(runs, ("answers",)),
        )
    return found


def _orders(runs: Sequence[TimedRun]) -> dict[str, list[Order]]:
    """By kind, without those of each run's warm-up."""
    found: dict[str, list[Order]] = {"encode": [], "backward": [], "pack": []}
    for run in runs:
        orders = [*run.units(), *run.packs()]
        for kind, of_kind in found.items():
            of_kind += [order for order in orders if order.kind == kind][WARM_UP:]
    return found


def _ends(runs: Sequence[TimedRun], cores: Cores) -> tuple[dict[tuple[Role, int], float], dict[Role, float]]:
    """Of a side and its number of ranks: reductions, which ranks end together, so that the call of the one that came
    last, the shortest, says how long they take; and updates, which each has for itself."""
    reduce: dict[tuple[Role, int], list[float]] = {}
    update: dict[Role, list[float]] = {}
    for run in runs:
        for role in SIDES:
            for orders in run.orders("reduce", role)[1:]:
                shortest = min(_alone(order, cores) for order in orders)
                reduce.setdefault((role, run.num_ranks(role)), []).append(shortest)
            for orders in run.orders("update", role)[1:]:
                update.setdefault(role, []).extend(_alone(order, cores) for order in orders)
    return ({key: median(of) for key, of in reduce.items()}, {role: median(of) for role, of in update.items()})


def fit(
    bases: Mapping[str, CostModel], settings: Mapping[str, Mapping[str, Sequence[Order]]], cores: int
) -> tuple[dict[str, Lines], Cores]:
    """Lines of each setting, seconds of each feature for each kind of order that there is, and the cores' speed;
    `bases`: FLOPs."""
    priors = {name: _priors(base.coefficients()) for name, base in bases.items()}
    speed = Cores(cores)
    for _ in range(ROUNDS):
        lines = {
            name: {kind: _line(orders, priors[name][kind], speed) for kind, orders in by_kind.items() if orders}
            for name, by_kind in settings.items()
        }
        pairs = [(order, lines[name][kind]) for name in lines for kind in lines[name] for order in settings[name][kind]]
        speed = Cores(cores, _together(pairs))
    return lines, speed


def _priors(real: Mapping[str, float]) -> Lines:
    producer, consumer = ([real[name] for name in names] for names in (PRODUCER, CONSUMER))
    return {"encode": producer, "backward": producer, "pack": consumer}


def _alone(order: Order, cores: Cores) -> float:
    """Seconds that it would have taken alone."""
    return sum(seconds * cores.speed(others + 1) for others, seconds in enumerate(order.seconds))


def _line(orders: Sequence[Order], prior: Sequence[float], cores: Cores) -> Sequence[float]:
    fit = LineFit(prior)
    for order in orders:
        fit.add(order.features, _alone(order, cores))
    found = fit.solve()
    assert found is not None, f"{len(orders)} calls are too few for a line"
    return found.usable


def with_interruptions(line: Sequence[float], orders: Sequence[Order], cores: Cores) -> Sequence[float]:
    """The line that gives these orders the time which they took all together: a step is made of all, and the fit leaves
    out those that readers or the controller interrupted."""
    told = sum(c * f for order in orders for c, f in zip(line, order.features, strict=True))
    whole = sum(_alone(order, cores) for order in orders) / told
    return [whole * coefficient for coefficient in line]


def _together(orders: Iterable[tuple[Order, Sequence[float]]]) -> float:
    """What makes shared seconds agree with the lines."""
    told = alone = shared = 0.0
    for order, line in orders:
        if (both := sum(order.seconds[1:])) > 0.0:
            told += sum(c * f for c, f in zip(line, order.features, strict=True))
            alone, shared = alone + order.seconds[0], shared + both
    return min(max((told - alone) / shared, LEAST_TOGETHER), 1.0) if shared else 1.0


def _model(base: CostModel, kind: str, line: Sequence[float]) -> CostModel:
    names = CONSUMER if kind == "pack" else PRODUCER
    geometry = {name: getattr(base, name) for name in ("full_layers", "windowed_layers", "window_tokens")}
    found = {"token": 0.0, **dict(zip(names, line, strict=True))}
    return CostModel.from_coefficients(**found, **geometry)


def _control(runs: Sequence[TimedRun]) -> Control:
    """A message is an order to a rank with nothing to do, or an answer; what the controller does goes by answers."""
    ways: dict[str, list[float]] = {"there": [], "back": []}
    for run in runs:
        begin, _ = _steady(run)
        for track in run.timeline.tracks:
            free = 0
            for call in track.calls:
                if call.method != "read" and call.sent is not None and call.taken is not None and call.start > begin:
                    ways["back"].append((call.taken - call.end) / 1e9)
                    if call.sent > free:
                        ways["there"].append((call.start - call.sent) / 1e9)
                free = call.end
    return Control(fmean(map(fmean, ways.values())), _controller_seconds(runs, ("orders", "answers")))


def _steady(run: TimedRun) -> tuple[int, int]:
    """From the second step on: begin and end, on the clock of the run."""
    return run.timeline.step(2)[0], max(run.timeline.marks.values())  # type: ignore[index]


def _controller_seconds(runs: Sequence[TimedRun], pieces: Sequence[str]) -> float:
    """Of these pieces of the controller's loop, for each answer."""
    busy = answers = 0.0
    for run in runs:
        begin, end = _steady(run)
        own = [piece for piece in run.timeline.controller if piece.name in pieces and begin < piece.start < end]
        busy += sum(piece.end - piece.start for piece in own) / 1e9
        answers += sum(begin < at < end for at, _, _ in run.timeline.answers)
    return busy / answers


def _read_seconds(runs: Sequence[TimedRun], cores: Cores) -> float:
    """Of a row, read by a process alone: readers share the cores with the other ranks. A block is as large as a step,
    at most."""
    return median(
        _alone(order, cores) / (run.config.train.step.samples or 1)
        for run in runs
        for orders in run.orders("read", Role.READER)
        for order in orders
    )
