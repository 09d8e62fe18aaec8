"""What is expected of a plan that is made, before it runs: its rate, and the seconds of its sides (pure).

| by | where |
|---|---|
| profile | modules were measured on this machine (`predict`) |
| model | all processes are on devices of one kind that the hardware table knows, each on its own |

None elsewhere. Drift compares a run with it (`drift`); a person finds it in `plan.yaml` and the decision log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.allocator.devices import devices_of
from flowtrain.allocator.drift import Expected
from flowtrain.allocator.fit import candidate_of
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.load import CandidateTable, ModuleLoad
from flowtrain.allocator.make import num_threads
from flowtrain.allocator.place import NodeRoom
from flowtrain.allocator.predict import Setup, predict
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.profile import Profile
from flowtrain.allocator.solve import Choice, Problem
from flowtrain.allocator.stats import DataStats
from flowtrain.allocator.throughput import rates
from flowtrain.config.schema import Config
from flowtrain.plan import Plan
from flowtrain.shapes import ModelShape
from flowtrain.types import Role


@dataclass(frozen=True, slots=True)
class Forecast:
    """`ratios`: None where the sizes of rows are assumed, or there is no encoder to compare with."""

    samples_per_second: float
    step_seconds: float
    by: str
    ratios: Expected | None

    def to_dict(self) -> dict[str, Any]:
        """JSON and YAML ready."""
        return {"samples_per_second": self.samples_per_second, "step_seconds": self.step_seconds, "by": self.by}


def forecast(
    config: Config,
    shape: ModelShape,
    plan: Plan,
    inventory: Inventory,
    stats: DataStats | None = None,
    profile: Profile | None = None,
    nodes: Sequence[NodeRoom] | None = None,
) -> Forecast | None:
    """`stats`: sizes of the rows where they are known; `nodes`: of a cluster that was joined."""
    if profile is not None:
        return _measured(plan, profile)
    cluster = devices_of(config, inventory, nodes)
    on_gpu = {rank.on_gpu for side in (plan.producers, plan.consumers) for rank in side.ranks}
    if cluster is None or on_gpu != {not cluster[0].node.on_cpu}:
        return None
    if cluster[0].node.on_cpu and num_threads(plan) > cluster[0].devices:
        return None
    problem = question_of(config, shape, stats, cluster).problem()
    colocated = plan.placement == "colocated"
    choices = [_choice(config, problem, load, plan, colocated) for load in problem.loads]
    if not all(choice.packs >= choice.candidate.pp for choice in choices):
        return None
    groups = range(1 if colocated else len(problem.loads))
    seconds = [sum(choice.seconds for choice in choices if choice.group == g) for g in groups]
    partition = tuple(tuple(m for m, choice in enumerate(choices) if choice.group == g) for g in groups)
    rate = problem.plan(partition, (0,) * len(partition), tuple(seconds), choices).rate
    by = "model" if stats is not None else "model, of assumed rows"
    ratios = None if stats is None or colocated or len(choices) < 2 else _ratios(choices, plan)
    return Forecast(rate, problem.job.step_samples / rate, by, ratios)


def _measured(plan: Plan, profile: Profile) -> Forecast:
    sides = plan.producers.ranks, plan.consumers.ranks
    (producers, consumers), (p_threads, c_threads) = map(len, sides), (side[0].threads for side in sides)
    on_cpu = not any(rank.on_gpu for side in sides for rank in side)
    colocated = plan.placement == "colocated"
    found = predict(profile, Setup(colocated, producers, p_threads, consumers, c_threads, plan.cpus, on_cpu))
    packs = [pack for step in profile.steps for pack in step]
    ratios = Expected(
        seconds_ratio=found.producer_seconds * producers / (found.consumer_seconds * consumers),
        work_ratio=sum(pack.encode for pack in packs) / sum(pack.train for pack in packs),
    )
    return Forecast(found.samples_per_second, found.step_seconds, "profile", None if colocated else ratios)


def _choice(config: Config, problem: Problem, load: ModuleLoad, plan: Plan, colocated: bool) -> Choice:
    """The backbone's group is the first."""
    side = plan.producers if load.role is Role.PRODUCER else plan.consumers
    candidate = candidate_of(config, side, load, problem)
    found = rates(load, candidate, problem.cluster[0].node, problem.job)
    rate, packs = float((found.shared_rate if colocated else found.rate)[0]), int(found.packs[0])
    memory = float(device_bytes(load, CandidateTable.of([candidate]), problem.job)[0])
    group = 0 if colocated or load.role is Role.CONSUMER else 1 + problem.loads.index(load)
    return Choice(load, candidate, 0, group, 1.0 / rate if rate else 0.0, packs, memory)


def _ratios(choices: Sequence[Choice], plan: Plan) -> Expected:
    """Processes that share packs count once."""
    backbone = choices[-1]
    encoders = choices[:-1]
    busy = sum(choice.seconds for choice in encoders) * plan.producers.layout.dp_degree
    return Expected(
        seconds_ratio=busy / (backbone.seconds * plan.consumers.layout.dp_degree),
        work_ratio=sum(choice.load.train_flops for choice in encoders) / backbone.load.train_flops,
    )
