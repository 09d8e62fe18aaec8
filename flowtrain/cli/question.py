"""What a plan is asked for, from a command line: devices, model, sizes of the data; for `plan` and `simulate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from flowtrain.allocator.hardware import Cluster
    from flowtrain.allocator.problem import Question
    from flowtrain.allocator.stats import DataStats
    from flowtrain.config.schema import Config


def read_config(source: Path, overrides: list[str] | None) -> Config:
    """The config of a run."""

    from flowtrain.config.loading import load_config

    return load_config(source, overrides or ()).config


def cluster_of(names: list[str], nodes: int | None, devices_per_node: int | None) -> Cluster:
    """The devices that `--device`, `--nodes` and `--devices-per-node` name."""
    from flowtrain.allocator.hardware import MOST_DEVICES, NodePool, node_type, num_devices

    pools = []
    for text in names:
        name, _, count = text.partition(":")
        if count and not (count.isascii() and count.isdigit() and int(count)):
            raise ConfigError(f"--device {text}: after the colon stands the number of nodes, such as h100:4")
        try:
            node = node_type(name)
        except PlanError as error:
            raise ConfigError(f"--device {text}: {error}") from None
        if devices_per_node is not None:
            node = replace(node, devices=devices_per_node)
        if count and nodes is not None and all(":" in other for other in names):
            raise ConfigError(f"--nodes {nodes} beside --device {text}, which says its own number: leave one out")
        pools.append(NodePool(node, int(count) if count else nodes or 1))
    if (total := num_devices(pools)) > MOST_DEVICES:
        raise ConfigError(
            f"--device, --nodes and --devices-per-node make {total} devices and a plan has at most {MOST_DEVICES}: "
            f"lower them"
        )
    return tuple(pools)


def question_for(
    config: Config | None,
    source: Path,
    data: Path | None,
    cluster: Cluster,
    freeze: list[str],
    step_samples: int | None,
    pack_tokens: list[int] | None,
) -> tuple[Question, list[str]]:
    """The question, and what was assumed; a model folder goes with `--freeze`, `--step-samples` and `--pack-tokens`."""
    from flowtrain.allocator.problem import DEFAULT_PACK_TOKENS, Question, question_of
    from flowtrain.shapes import read_shape
    from flowtrain.types import Module

    shape = read_shape(config.model.path if config else source)
    audio = any(encoder.modality == "audio" for encoder in shape.encoders)
    most = config.packing.max_tokens if config else max(pack_tokens or DEFAULT_PACK_TOKENS)
    longest = config.max_row_tokens if config else most
    stats, notes = _stats(config, data, min(most, longest), audio)
    if longer := int((stats.lengths > longest).sum()):
        notes.append(f"{longer} of {len(stats)} rows have more than {longest} tokens: they are left out")
    if shape.generic:
        notes.append(f"the family {shape.family!r} is read by the names that configs share: sizes are estimates")
    if config is not None:
        return question_of(config, shape, stats, cluster), notes
    modules = {module.value for module in Module}
    if unknown := [name for name in freeze if name not in modules]:
        raise ConfigError(f"--freeze {unknown[0]}: choose among {', '.join(sorted(modules))}")
    if set(freeze) == modules:
        raise ConfigError("--freeze names every module and nothing would train: leave one out")
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


def dtype_of(name: str | None, question: Question) -> str:
    """The dtype that `--dtype` names; without it that of the question."""
    from flowtrain.shapes import DTYPE_BYTES

    if name is not None and name not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {name}: choose among {', '.join(sorted(DTYPE_BYTES))}")
    return name or question.dtype


def placements_of(placement: str | None, question: Question) -> frozenset[str]:
    """Where modules may be, by `--placement`, else as the question says."""

    from flowtrain.allocator.solve import ANYWHERE

    if placement is None:
        return question.placements
    if placement == "auto":
        return ANYWHERE
    if placement not in ("colocated", "disaggregated"):
        raise ConfigError(f"--placement {placement}: choose auto, colocated or disaggregated")
    return frozenset({placement})
