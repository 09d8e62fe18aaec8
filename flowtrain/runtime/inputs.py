"""What a run is made from, read before anything starts, and what follows from it alone: order, rules, costs, length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.allocator import Forecast, pack_room
from flowtrain.config.schema import Config
from flowtrain.data.sources import Source, open_source
from flowtrain.errors import ConfigError, DataError
from flowtrain.packing import CompositionSpec, CostModel
from flowtrain.plan import Plan
from flowtrain.pool.block import block_bytes
from flowtrain.runtime.decisions import Costs, ReplayLog
from flowtrain.shapes import ModelShape, payload_bytes
from flowtrain.types import Module, Role, SampleMeta


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is made from, read before anything starts."""

    config: Config
    run_dir: Path
    shape: ModelShape
    plan: Plan
    train: Source
    eval: Source | None
    resume: Path | None
    state: dict[str, Any] | None
    replay: ReplayLog | None
    expected: Forecast | None = None

    @property
    def first_step(self) -> int:
        return self.state["step"] if self.state else 0

    @property
    def horizon(self) -> int | None:
        """Positions of a run by epochs (one where nothing is said); None for one by steps, which has no end of rows."""
        train = self.config.train
        return None if train.max_steps is not None else len(self.train) * (train.epochs or 1)

    @property
    def data_order(self) -> dict[str, Any]:
        """What positions mean: a checkpoint's state of the data holds for this order of rows only."""
        order = {"seed": self.config.run.seed, "shuffle": self.config.data.shuffle}
        return {"fingerprint": self.train.fingerprint, "rows": len(self.train), **order}

    def sample_bytes(self, sample: SampleMeta) -> int:
        """Payload bytes of a sample's features in the pool."""
        return self.feature_bytes(sample.vision_tokens, sample.patches)

    def feature_bytes(self, tokens: int, patches: int) -> int:
        """The same, of a sample of so many vision tokens and patches."""
        return payload_bytes(self.shape.features(self.config.cut), self.config.model.dtype, tokens, patches)

    @property
    def reduced_roles(self) -> frozenset[Role]:
        """Sides on which something trains."""
        on_producer = self.config.producer_modules
        trainable = set(Module) - self.config.frozen
        sides = {Role.PRODUCER: on_producer, Role.CONSUMER: set(Module) - on_producer}
        return frozenset(role for role, modules in sides.items() if modules & trainable)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long the run is, where it begins, and what comes between steps."""

    total_steps: int
    first_step: int
    has_eval: bool
    eval_every: int | None
    save_every: int | None

    def evaluates(self, step: int) -> bool:
        return self.has_eval and self.eval_every is not None and step % self.eval_every == 0

    def saves(self, step: int) -> bool:
        return self.save_every is not None and step % self.save_every == 0


def open_rows(path: Path) -> Source:
    """`DataError` when there are none."""
    source = open_source(path)
    if not len(source):
        raise DataError(f"{path} has no rows: give a file that has some")
    return source


def check_resume(inputs: Inputs, total: int) -> None:
    """A checkpoint names rows by their position, so it needs the rows and the order that it was made with (K01)."""
    if inputs.state is None:
        return
    before, now = inputs.state["data"], inputs.data_order
    for key, name in (("seed", "run.seed"), ("shuffle", "data.shuffle")):
        if before[key] != now[key]:
            raise ConfigError(
                f"{name} is {now[key]} and the checkpoint {inputs.resume} was made with {before[key]}: the order of "
                f"rows would change; set it back, or start a new run"
            )
    if before != now:
        raise ConfigError(
            f"{inputs.config.data.train} has changed since the checkpoint {inputs.resume} was made ({before['rows']} "
            f"rows then, {now['rows']} now): restore it, or start a new run"
        )
    if inputs.first_step > total:
        raise ConfigError(
            f"the run has {total} steps (train.max_steps or train.epochs) and the checkpoint {inputs.resume} is "
            f"at step {inputs.first_step}: raise them, or go on from an earlier checkpoint"
        )


def composition(inputs: Inputs) -> CompositionSpec:
    """The rules by which rows become steps."""
    config, plan = inputs.config, inputs.plan
    return CompositionSpec.of(
        config.packing,
        config.packing_policy,
        config.train.step,
        consumers=plan.consumers.layout,
        producers=plan.producers.layout,
        colocated=plan.placement == "colocated",
        trainable_encoder=config.trainable_encoder,
        max_unit_patches=config.producers.max_unit_patches,
        max_pack_vision_bytes=pack_room(config, inputs.shape).cap,
        block_bytes=lambda tokens, patches: block_bytes(inputs.feature_bytes(tokens, patches)),
        num_rows=len(inputs.train),
        horizon=inputs.horizon,
    )


def composition_entry(inputs: Inputs, spec: CompositionSpec) -> dict[str, Any]:
    """What the decision log says of composition, beside the cost model."""
    return {"seed": inputs.config.run.seed, "fingerprint": inputs.train.fingerprint, **spec.to_dict()}


def costs_of(inputs: Inputs) -> Costs:
    """The cost models by which steps are composed, as far as a checkpoint or a log has them."""
    config = inputs.config
    base = CostModel.from_shape(inputs.shape, config.frozen, config.cut, config.packing.attention_efficiency)
    costs = Costs(base, inputs.first_step, fits=config.packing.cost == "fitted", log=inputs.replay)
    if inputs.state is not None and "costs" in inputs.state:
        costs.load_state(inputs.state["costs"])
    return costs


def schedule_of(inputs: Inputs) -> Schedule:
    """The steps that `train.max_steps` or `train.epochs` ask for."""
    train = inputs.config.train
    total = train.max_steps
    if total is None:
        assert train.step.samples is not None, "steps by packs have max_steps"
        assert inputs.horizon is not None, "a run without max_steps goes by epochs"
        total = math.ceil(inputs.horizon / train.step.samples)
    every = inputs.config.checkpoint.every
    return Schedule(total, inputs.first_step, inputs.eval is not None, train.eval_every, every)
