"""`flowtrain plan`: the best plan for devices that need not be here, what to expect of it, and why it is that one.

    CONFIG | MODEL_DIR ─▶ shape ┐
    --data, scan, assumed ─▶ sizes ├─▶ problem ─▶ policy ─▶ report, --json, --out plan.yaml
    --device, --nodes, this machine ┘

Nothing heavy is loaded: neither torch, nor Ray, nor transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowtrain.cli.options import (
    ComputeDtype,
    Debug,
    DevicesPerNode,
    Freeze,
    JsonFile,
    Nodes,
    Overrides,
    PackTokens,
    Policy,
    StepSamples,
)
from flowtrain.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from flowtrain.allocator.problem import Question
    from flowtrain.allocator.report import Report
    from flowtrain.allocator.solve import Problem
    from flowtrain.config.schema import Config

DEFAULT_DEVICE = "h100"


def register(app: typer.Typer) -> None:
    app.command("plan", short_help="Find and explain the best plan for some devices.")(plan)


def plan(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|MODEL_DIR", help="YAML file of a run, or a model folder.")],
    nodes: Nodes = None,
    devices_per_node: DevicesPerNode = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NAME[:NODES]",
            help="Such as h100, b200, mi300x, cpu (docs/allocator.md has all); may be repeated for a mixed cluster.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="FILE", help="Row sizes: a scan or a trace.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Plan for this machine by a profile of it.")
    ] = None,
    policy: Policy = None,
    freeze: Freeze = None,
    step_samples: StepSamples = None,
    pack_tokens: PackTokens = None,
    dtype: ComputeDtype = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", help="auto, colocated or disaggregated; default: the config's, or auto."),
    ] = None,
    anything: Annotated[
        bool, typer.Option("--any", help="Also plans that cannot be launched: mixed placements, sides cut and shared.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write plan.yaml, for launch --plan.")
    ] = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Find the best plan for a cluster that need not be here, and say what to expect and why it is that one."""
    import json

    from flowtrain.cli.question import cluster_of, dtype_of, placements_of, question_for, read_config
    from flowtrain.cli.rundir import writing
    from flowtrain.telemetry.files import write_atomic

    config = None if source.is_dir() else read_config(source, overrides)
    if config is not None and (freeze or step_samples or pack_tokens):
        raise ConfigError("--freeze, --step-samples and --pack-tokens are for a model folder: use --set with a config")
    if config is None and overrides:
        raise ConfigError("--set changes a config, and this is a model folder: leave it out")
    if profile is not None:
        elsewhere = (device, nodes, devices_per_node, data, policy, dtype, placement)
        if config is None or any(option is not None for option in elsewhere):
            raise ConfigError(
                "--profile goes with a config and this machine: give a config, leave out --device, --nodes, "
                "--devices-per-node and --data, and use --set for policy, dtype and placement"
            )
        from flowtrain.cli.plan_measured import plan_measured

        plan_measured(config, profile, json_file, out)
        return
    if config is not None and not device:
        raise ConfigError("say which devices to plan for, such as --device h100 or --profile for this machine")
    cluster = cluster_of(device or [DEFAULT_DEVICE], nodes, devices_per_node)
    question, notes = question_for(config, source, data, cluster, freeze or [], step_samples, pack_tokens)
    question = replace(question, dtype=dtype_of(dtype, question), placements=placements_of(placement, question))
    report = _report(
        question, config, policy or (config.policy if config else "flow_matching"), source, notes, anything
    )
    typer.echo(report.text())
    for file, text in ((json_file, json.dumps(report.to_dict(), indent=2) + "\n"), (out, _plan_text(report))):
        if file is not None:
            with writing(file):
                write_atomic(file, text)


def _report(
    question: Question, config: Config | None, policy: str, source: Path, notes: list[str], anything: bool
) -> Report:
    from flowtrain.allocator.bound import bound_note, bound_scope
    from flowtrain.allocator.candidates import WHOLE
    from flowtrain.allocator.explain import explain
    from flowtrain.allocator.footprint import device_bytes
    from flowtrain.allocator.loads import unused_encoders
    from flowtrain.allocator.memory import memory_of
    from flowtrain.allocator.modelled import holds
    from flowtrain.allocator.policies import POLICIES
    from flowtrain.allocator.refuse import refusal
    from flowtrain.allocator.report import Report
    from flowtrain.allocator.room import pack_room
    from flowtrain.allocator.runnable import everything, runnable, search_spaces

    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: choose among {', '.join(POLICIES)}")
    problem = question.problem()
    scope = WHOLE if config is None else bound_scope(config)
    bound = [] if config is None else bound_note(config)
    replan = config is not None and config.allocation.replan != "off"
    all_spaces = everything(problem, scope)
    cannot = _not_launched(question, problem)
    spaces = all_spaces if anything or cannot else runnable(problem, scope, question.shape, replan)
    ranked = search_spaces(problem, device_bytes, POLICIES[policy], spaces)
    if not ranked:
        first = (spaces or all_spaces)[0]
        told = [refusal(first.of(problem), device_bytes, first.scope), *bound]
        if spaces is not all_spaces and search_spaces(problem, device_bytes, POLICIES[policy], all_spaces):
            told.append("--any plans what this release cannot launch")
        raise PlanError("; ".join(told))
    space, found = ranked[0]
    notes = [*notes, *cannot]
    others = {problem.placement(plan.partition): plan for _, plan in reversed(ranked)}
    others.pop(problem.placement(found.partition))
    beside = [other for other in spaces if other is not space]
    if config is not None and not holds(config.pool.bytes, pack_room(config, question.shape), found):
        notes.append(f"pool.bytes is {config.pool.bytes}, too little for the packs that run together: raise it")
    unused = unused_encoders(question.shape, question.stats)
    notes = [*notes, *bound, *(f"the data have nothing for {name}: it gets no devices" for name in unused)]
    problem = space.of(problem)
    why = explain(problem, device_bytes, found, space.scope, question.other_data(), beside, list(others.values()))
    parts = {
        choice.load.name: memory_of(choice.load, choice.candidate, problem.job).parts() for choice in found.choices
    }
    return Report(str(source), problem, found, why, tuple(notes), parts)


def _not_launched(question: Question, problem: Problem) -> list[str]:
    """Why this release cannot launch the model, whatever its plan."""
    from flowtrain.shapes import check_family

    if len(problem.loads) > 2:
        return [f"this release cannot launch {len(problem.loads) - 1} encoders beside each other: for planning only"]
    try:
        check_family(question.shape.family)
    except ConfigError as error:
        return [f"for planning only: {error}"]
    return []


def _plan_text(report: Report) -> str:
    from flowtrain.allocator.planfile import plan_file_text

    return plan_file_text(report)
