"""A plan file as `flowtrain simulate` plays it: the modules of `expected`, under the layouts that stand above it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from flowtrain.allocator.load import Candidate
    from flowtrain.allocator.solve import Choice, Problem


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """`model`: what was planned for; `devices` as `--device` takes them; `candidates` by name of the module."""

    path: Path
    model: Path
    devices: list[str]
    step_samples: int
    colocated: bool
    candidates: dict[str, Candidate]
    device_of: dict[str, str]


def plan_in(source: Path) -> WrittenPlan | None:
    """The plan in a file of `flowtrain plan --out`; None where the file is something else.

    Raises:
        ConfigError: it is a plan, and not one that says what is expected of it.
    """
    from flowtrain.allocator.hardware import node_type
    from flowtrain.allocator.load import RECOMPUTE, Candidate
    from flowtrain.allocator.planfile import read_plan_file
    from flowtrain.config.document import read_document
    from flowtrain.plan import layout_of

    if source.is_dir():
        return None
    try:
        data = read_document(source.read_text(encoding="utf-8"), str(source)).data
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read ({error}): give a config, a model folder or a plan") from None
    if not isinstance(data, dict) or "placement" not in data:
        return None
    plan = read_plan_file(source)
    again = "write one with `flowtrain plan --out`"
    if plan.placement == "mixed":
        raise PlanError(f"{source}: placement: mixed placements cannot be simulated: {again} and --placement")
    try:
        expected: dict[str, Any] = data["expected"]
        layouts = {role.value: layout_of(text) for role, text in plan.layouts.items()}
        candidates, device_of = {}, {}
        for name, module in expected["modules"].items():
            layout = layouts["consumer" if name == "backbone" else "producer"]
            schedule = str(module["schedule"])
            candidates[name] = Candidate(
                layout.dp_replicate,
                layout.dp_shard,
                layout.tp,
                layout.cp,
                layout.pp,
                int(schedule.rpartition("-")[2]) if schedule.startswith("interleaved") else 1,
                layout.ep,
                int(module["pack_tokens"]),
                RECOMPUTE.index(module["recompute"]),
                int(module["threads"]),
            )
            device_of[name] = str(module["device"])
        counts: dict[str, int] = {}
        for name, candidate in candidates.items():
            taken = candidate.devices
            before = counts.get(device_of[name], 0)
            counts[device_of[name]] = max(before, taken) if plan.placement == "colocated" else before + taken
        model, step = Path(expected["model"]), int(expected["step_samples"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: `expected` does not say the modules of a plan ({error!r}): {again}") from None
    if not model.exists():
        raise ConfigError(f"{source}: expected.model: {model} does not exist here: start where the plan was made")
    devices = [f"{name}:{-(-count // node_type(name).devices)}" for name, count in counts.items()]
    return WrittenPlan(source, model, devices, step, plan.placement == "colocated", candidates, device_of)


def planned_choices(plan: WrittenPlan, problem: Problem) -> list[Choice]:
    """The modules of the problem as the plan has them.

    Raises:
        PlanError: the data use a module that the plan has not, or the plan's packs hold too little.
    """
    from flowtrain.allocator.footprint import device_bytes
    from flowtrain.allocator.load import CandidateTable
    from flowtrain.allocator.solve import Choice
    from flowtrain.allocator.throughput import rates

    names = [pool.node.name for pool in problem.cluster]
    choices = []
    for place, load in enumerate(problem.loads):
        candidate = plan.candidates.get(load.name)
        if candidate is None:
            known = ", ".join(plan.candidates)
            raise PlanError(f"{plan.path} has devices for {known}, and the data need {load.name}: plan for these data")
        pool = names.index(plan.device_of[load.name])
        node = problem.cluster[pool].node
        job = replace(problem.job, pack_tokens=(candidate.pack_tokens,))
        found = rates(load, candidate, node, job)
        if not found.rate[0]:
            raise PlanError(
                f"{plan.path}: {load.name} has {candidate.pp} pipeline stages and a step has {found.packs[0]} packs a "
                f"replica: make steps larger, or plan for these data"
            )
        memory = float(device_bytes(load, CandidateTable.of([candidate]), job)[0])
        group = 0 if plan.colocated else place
        choices.append(Choice(load, candidate, pool, group, 1.0 / found.rate[0], int(found.packs[0]), memory))
    return choices
