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

from flowtrain.cli.options import Debug, JsonFile, Overrides
from flowtrain.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from flowtrain.allocator.hardware import Cluster
    from flowtrain.allocator.problem import Question
    from flowtrain.allocator.report import Report
    from flowtrain.allocator.stats import DataStats
    from flowtrain.config.schema import Config

DEFAULT_DEVICE = "h100"


def register(app: typer.Typer) -> None:
    app.command("plan", short_help="Find and explain the best plan for some devices.")(plan)


def plan(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|MODEL_DIR", help="YAML file of a run, or a model folder.")],
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option("--devices-per-node", min=1, help="Devices of a node; default: the device's usual.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NAME[:NODES]",
            help="a100, h100, h200, b200, mi300x, l40s, ascend910b, cpu; may be repeated for a mixed cluster.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="FILE", help="Row sizes: a scan or a trace.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Plan for this machine by a profile of it.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", metavar="NAME", help="Who divides the devices.")] = None,
    freeze: Annotated[
        list[str] | None, typer.Option("--freeze", metavar="MODULE", help="encoder, projector, backbone (MODEL_DIR).")
    ] = None,
    step_samples: Annotated[
        int | None, typer.Option("--step-samples", min=1, help="Samples of a step (MODEL_DIR).")
    ] = None,
    pack_tokens: Annotated[
        list[int] | None, typer.Option("--pack-tokens", min=1, help="Most tokens of a pack, choices (MODEL_DIR).")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Compute dtype; default: the config's, or bf16.")] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", help="auto, colocated or disaggregated; default: the config's, or auto."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write plan.yaml, for launch --plan.")
    ] = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Find the best plan for a cluster that need not be here, and say what to expect and why it is that one."""
    import json

    from flowtrain.cli.rundir import writing
    from flowtrain.telemetry.files import write_atomic

    config = None if source.is_dir() else _config(source, overrides)
    if config is not None and (freeze or step_samples or pack_tokens):
        raise ConfigError("--freeze, --step-samples and --pack-tokens are for a model folder: use --set with a config")
    if config is None and overrides:
        raise ConfigError("--set changes a config, and this is a model folder: leave it out")
    if profile is not None:
        if config is None or device:
            raise ConfigError("--profile goes with a config and this machine: give a config, and leave out --device")
        from flowtrain.cli.plan_measured import plan_measured

        plan_measured(config, profile, json_file, out)
        return
    if config is not None and not device:
        raise ConfigError("say which devices to plan for, such as --device h100 or --profile for this machine")
    cluster = _cluster(device or [DEFAULT_DEVICE], nodes, devices_per_node)
    question, notes = _question(config, source, data, cluster, freeze or [], step_samples, pack_tokens)
    question = replace(question, dtype=dtype or question.dtype, placements=_placements(placement, question))
    report = _report(question, policy or (config.policy if config else "flow_matching"), source, notes)
    typer.echo(report.text())
    for file, text in ((json_file, json.dumps(report.to_dict(), indent=2) + "\n"), (out, _plan_text(report))):
        if file is not None:
            with writing(file):
                write_atomic(file, text)


def _config(source: Path, overrides: list[str] | None) -> Config:
    from flowtrain.config.loading import load_config

    return load_config(source, overrides or ()).config


def _cluster(names: list[str], nodes: int | None, devices_per_node: int | None) -> Cluster:
    from flowtrain.allocator.hardware import NodePool, node_type

    pools = []
    for text in names:
        name, _, count = text.partition(":")
        if count and not (count.isdigit() and int(count)):
            raise ConfigError(f"--device {text}: after the colon stands the number of nodes, such as h100:4")
        try:
            node = node_type(name)
        except PlanError as error:
            raise ConfigError(f"--device {text}: {error}") from None
        if devices_per_node is not None:
            node = replace(node, devices=devices_per_node)
        pools.append(NodePool(node, int(count) if count else nodes or 1))
    return tuple(pools)


def _question(
    config: Config | None,
    source: Path,
    data: Path | None,
    cluster: Cluster,
    freeze: list[str],
    step_samples: int | None,
    pack_tokens: list[int] | None,
) -> tuple[Question, list[str]]:
    from flowtrain.allocator.problem import DEFAULT_PACK_TOKENS, Question, question_of
    from flowtrain.shapes import read_shape
    from flowtrain.types import Module

    shape = read_shape(config.model.path if config else source)
    audio = any(encoder.modality == "audio" for encoder in shape.encoders)
    most = config.packing.max_tokens if config else max(pack_tokens or DEFAULT_PACK_TOKENS)
    stats, notes = _stats(config, data, most, audio)
    if shape.generic:
        notes.append(f"the family {shape.family!r} is read by the names that configs share: sizes are estimates")
    if config is not None:
        return question_of(config, shape, stats, cluster), notes
    modules = {module.value for module in Module}
    if unknown := [name for name in freeze if name not in modules]:
        raise ConfigError(f"--freeze {unknown[0]}: choose among {', '.join(sorted(modules))}")
    question = Question(
        shape, stats, frozenset(map(Module, freeze)), cluster, step_samples=step_samples,
        pack_tokens=tuple(sorted(set(pack_tokens or DEFAULT_PACK_TOKENS))),
    )  # fmt: skip
    return question, notes


def _stats(config: Config | None, data: Path | None, most: int, audio: bool) -> tuple[DataStats, list[str]]:
    from flowtrain.allocator.stats import assumed_stats, known_stats, read_stats

    stats = read_stats(data) if data is not None else known_stats(config.data.train) if config else None
    if stats is not None:
        return stats, [stats.summary()]
    stats = assumed_stats(most, audio)
    return stats, [f"{stats.summary()} (give --data, or run `flowtrain data scan`)"]


def _placements(placement: str | None, question: Question) -> frozenset[str]:
    from flowtrain.allocator.solve import ANYWHERE

    if placement is None:
        return question.placements
    if placement == "auto":
        return ANYWHERE
    if placement not in ("colocated", "disaggregated"):
        raise ConfigError(f"--placement {placement}: choose auto, colocated or disaggregated")
    return frozenset({placement})


def _report(question: Question, policy: str, source: Path, notes: list[str]) -> Report:
    from flowtrain.allocator.candidates import WHOLE
    from flowtrain.allocator.explain import explain
    from flowtrain.allocator.footprint import device_bytes
    from flowtrain.allocator.loads import unused_encoders
    from flowtrain.allocator.memory import memory_of
    from flowtrain.allocator.policies import POLICIES
    from flowtrain.allocator.refuse import refusal
    from flowtrain.allocator.report import Report

    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: choose among {', '.join(POLICIES)}")
    problem = question.problem()
    found = POLICIES[policy](problem, device_bytes, WHOLE)
    if found is None:
        raise refusal(problem, device_bytes, WHOLE)
    unused = unused_encoders(question.shape, question.stats)
    notes = [*notes, *(f"the data have nothing for {name}: it gets no devices" for name in unused)]
    why = explain(problem, device_bytes, found, WHOLE, question.other_data())
    parts = {
        choice.load.name: memory_of(choice.load, choice.candidate, problem.job).parts() for choice in found.choices
    }
    return Report(str(source), problem, found, why, tuple(notes), parts)


def _plan_text(report: Report) -> str:
    from flowtrain.allocator.planfile import plan_file_text

    return plan_file_text(report)
