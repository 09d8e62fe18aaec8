"""Builds the stage of a producer or a consumer: its half of the model, of which it holds what the layout of its side
says, its part of the pool, its updater.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowtrain.config.schema import Config
from flowtrain.consumer.stage import ConsumerStage
from flowtrain.data.images import EncoderInputs
from flowtrain.data.measure import open_measure
from flowtrain.data.sources import open_source
from flowtrain.errors import PlanError
from flowtrain.flops import section_costs
from flowtrain.models.backbone import BackboneHalf
from flowtrain.models.compiled import compile_layers
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.half import Half
from flowtrain.models.leak import check_packing
from flowtrain.models.table import parameter_rows
from flowtrain.parallel.context import apply_context
from flowtrain.parallel.groups import Groups
from flowtrain.parallel.holding import Holding
from flowtrain.parallel.links import Links
from flowtrain.parallel.mesh import PEER_AXES, dp_rank
from flowtrain.parallel.spread import SideSpread
from flowtrain.pipeline import Section, cut_sections
from flowtrain.plan import Layout
from flowtrain.pool.client import PoolClient
from flowtrain.pool.segment import SegmentHandle
from flowtrain.producer.stage import ProducerStage
from flowtrain.runtime.executor import StageReport, StageSpec
from flowtrain.runtime.peaks import peak_flops
from flowtrain.shapes import read_shape
from flowtrain.types import Phase
from flowtrain.update.collectives import Collectives
from flowtrain.update.updater import Updater

PRIMITIVES = 64
"""Shapes for which a process keeps the kernels of oneDNN: pictures come in many sizes, and of its own 1,024 an encoder
of 2 M parameters grows by 130 MiB. Another one is made in 0.15 ms."""

MakePool = Callable[[], PoolClient]
Span = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Built:
    """A stage, what its process holds of the parameters of its half, and what it tells of itself."""

    stage: Any
    holding: Holding
    report: StageReport


def build_producer(spec: StageSpec, config: Config, groups: Groups, make_pool: MakePool, span: Span) -> Built:
    """`make_pool` is called once the half is there; `span` names what the stage does."""
    half, holding = _load(EncoderHalf, spec, config, groups)
    measure = open_measure(config)
    paths = {Phase.TRAIN: config.data.train, Phase.EVAL: config.data.eval}
    sources = {
        phase: EncoderInputs(measure, open_source(path), config.data, span) for phase, path in paths.items() if path
    }
    pool = make_pool()
    stage = ProducerStage(
        dp_rank(spec.layout, spec.rank_plan.rank),
        config,
        half,
        pool,
        sources,
        _updater(half, spec, config, holding),
        measure.shape.features(config.cut),
        groups.over(PEER_AXES),
        groups.leads,
        span,
        Collectives(groups.over(("dp_shard",)), f"producer {groups.rank}", config.run.timeout_seconds).most,
    )
    return Built(stage, holding, _report(spec, config, half, pool.handle()))


def build_consumer(spec: StageSpec, config: Config, groups: Groups, make_pool: MakePool, span: Span) -> Built:
    """As `build_producer`.

    Raises:
        PlanError: the layout shares parameters that the family's samples go through one by one.
    """
    half, holding = _load(BackboneHalf, spec, config, groups)
    if check_packing(half) == "one-by-one" and spec.layout.world_size > spec.layout.dp_replicate:
        raise PlanError(
            f"consumers.layout: samples of {type(half.model).__name__} go through the backbone one by one, and ranks "
            f"that share its parameters must run as many forwards each: use copies, such as r2"
        )
    if groups.layout.cp > 1:
        apply_context(half, groups.carrying("cp"))
    if config.model.compile:
        compile_layers(half.model, half.device)
    pool = make_pool()
    stage = ConsumerStage(
        dp_rank(spec.layout, spec.rank_plan.rank),
        config,
        half,
        pool,
        _updater(half, spec, config, holding),
        torch.device(spec.rank_plan.device),
        groups.over(("cp", "tp")),
        groups.leads,
        spec.shares_copies,
        span,
        groups.layout,
        holding.stage,
        Links(groups, torch.device(spec.rank_plan.device)) if groups.layout.pp > 1 else None,
    )
    copies = pool.handle(within_machine=True) if spec.shares_copies else None
    return Built(stage, holding, _report(spec, config, half, copies))


def _load(kind: Any, spec: StageSpec, config: Config, groups: Groups) -> tuple[Any, Holding]:
    """Encoder or backbone, of which this rank reads what it holds."""
    torch.set_num_threads(spec.rank_plan.threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))  # read at its first convolution
    device = torch.device(spec.rank_plan.device)
    spread = SideSpread(groups, config.run.timeout_seconds, _sections(config, groups.layout))
    folder = Path(spec.weights_dir)
    half = kind.load(config.model.path, folder, config, device, config.parameter_dtype, spread)
    return half, spread.holding


def _sections(config: Config, layout: Layout) -> tuple[Section, ...]:
    """Of the backbone's pipeline, cut by cost; none without one."""
    if layout.pp == 1:
        return ()
    text = read_shape(config.model.path).text
    return cut_sections(*section_costs(text), layout.num_sections)


def _updater(half: Half, spec: StageSpec, config: Config, holding: Holding) -> Updater | None:
    """None where nothing of the half trains, here or elsewhere in a pipeline."""
    trainable = half.trainable_names()
    if not trainable:
        return None
    return Updater(
        half.parameters_by_name(),
        half.module_of(),
        config.train,
        holding,
        frozenset(config.debug.faults),
        spec.rank_plan.role,
        config.run.timeout_seconds,
        trainable,
    )


def _report(spec: StageSpec, config: Config, half: Half, segment: SegmentHandle | None) -> StageReport:
    rows = parameter_rows(half.all_parameters_by_name(), half.module_of())
    plan = spec.rank_plan
    return StageReport(peak_flops(plan.device, config.model.dtype, plan.threads), rows, segment)
