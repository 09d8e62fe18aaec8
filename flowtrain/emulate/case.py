"""What is asked of an emulation, and how it becomes a run: rows, plan by the allocator, config.

Case (model, trace, devices, freezing) ─┐
Variant (axes of a mode) ───────────────┴─ allocator's policy ─▶ Emulation + Config ─▶ a run
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flowtrain.allocator.candidates import WHOLE
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import NodePool, node_type
from flowtrain.allocator.policies import POLICIES
from flowtrain.allocator.problem import Question
from flowtrain.allocator.refuse import refusal
from flowtrain.allocator.room import pack_room, packs_together, to_pages
from flowtrain.allocator.solve import Choice, Solution
from flowtrain.allocator.stats import TRAINED_SHARE, DataStats, read_stats
from flowtrain.config.modes import MODES, ModeName
from flowtrain.config.schema import Config
from flowtrain.emulate.emulation import Emulation
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, layout_text
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.simulator.planned import with_patches
from flowtrain.sizes import read_trace, row_sizes
from flowtrain.telemetry.files import write_atomic
from flowtrain.types import Cut, Module, Role, SampleMeta

BYTE_SCALE = 1 / 64
ROWS = 4096
"""Rows of a trace that a run goes through again and again."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A value on each axis of the modes (contract C8)."""

    placement: str
    exchange: str
    policy: str
    composition: str

    @classmethod
    def of_mode(cls, name: ModeName, **axes: str) -> Variant:
        mode = MODES[name]
        given = {"placement": mode.placement, "exchange": mode.exchange, "policy": mode.allocation}
        return cls(**{**given, "composition": mode.composition, **axes})


@dataclass(frozen=True, slots=True)
class Case:
    """A model on devices, and the data.

    Attributes:
        model: folder with config.json; `trace`: parquet of row sizes.
        frozen: modules that do not train.
        pack_tokens: most tokens of a pack; longer rows are left out.
    """

    model: Path
    trace: Path
    device: str
    nodes: int
    frozen: frozenset[Module]
    step_samples: int
    pack_tokens: int
    devices_per_node: int = 8

    @property
    def shape(self) -> ModelShape:
        return read_shape(self.model)

    def rows(self) -> list[SampleMeta]:
        """Of the trace, with the patches that the model has for their images."""
        found, _ = read_trace(self.trace, trained_share=TRAINED_SHARE, about=ROWS)
        return [row for row in with_patches(found, self.shape) if row.tokens <= self.pack_tokens]

    def question(self, placement: str) -> Question:
        node = replace(node_type(self.device), devices=self.devices_per_node)
        return Question(
            self.shape,
            _stats(self.trace),
            self.frozen,
            (NodePool(node, self.nodes),),
            step_samples=self.step_samples,
            pack_tokens=(self.pack_tokens,),
            placements=frozenset({placement}),
        )

    def solve(self, variant: Variant) -> Solution:
        """The plan of the variant's policy.

        Raises:
            PlanError: nothing fits.
        """
        problem = self.question(variant.placement).problem()
        found = POLICIES[variant.policy](problem, device_bytes, WHOLE)
        if found is None:
            raise PlanError(refusal(problem, device_bytes, WHOLE))
        return found

    def emulation(
        self,
        choices: Sequence[Choice],
        *,
        time_scale: float = 1.0,
        byte_scale: float = BYTE_SCALE,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Emulation:
        job = self.question("disaggregated").problem().job
        cut = Cut.of(self.frozen)
        return Emulation(
            str(self.model.absolute()),
            self.device,
            self.nodes,
            self.devices_per_node,
            tuple(choices),
            job,
            cut,
            time_scale,
            byte_scale,
            jitter,
            seed,
        )

    def config(
        self, emulation: Emulation, variant: Variant, rows: Path, run_dir: Path, steps: int, **sections: dict[str, Any]
    ) -> Config:
        """Of a run on these rows; `sections` are laid over those of the case."""
        backbone = emulation.backbone.candidate
        copies = Layout(dp_replicate=backbone.replicas)
        layouts = {role: copies if emulation.colocated else emulation.layout(role) for role in SIDES}
        shared: dict[str, Any] = {"threads": 1, "device": "cuda"}
        content: dict[str, dict[str, Any]] = {
            "run": {"dir": run_dir, "seed": emulation.seed, "timeout_seconds": 60.0},
            "model": {"path": self.model, "dtype": emulation.job.dtype},
            "data": {"train": rows},
            "train": {
                "step": {"samples": self.step_samples},
                "max_steps": steps,
                "freeze": sorted(module.value for module in self.frozen),
            },
            "producers": {
                **shared,
                "layout": layout_text(layouts[Role.PRODUCER]),
                "max_unit_patches": emulation.job.unit_patches[0],
            },
            "consumers": {**shared, "layout": layout_text(layouts[Role.CONSUMER])},
            "pool": {"exchange": variant.exchange},
            "packing": {"policy": variant.composition, "max_tokens": backbone.pack_tokens},
            "allocation": {"placement": variant.placement},
            "checkpoint": {"export": False},
            "telemetry": {"progress": "off", "device_seconds": 0},
            "cluster": {"oversubscribe": True},
        }
        for name, keys in sections.items():
            content[name] = content.get(name, {}) | keys
        config = Config.model_validate(content)
        if "bytes" not in content["pool"]:
            pool = config.pool.model_copy(update={"bytes": pool_bytes(config, emulation)})
            config = config.model_copy(update={"pool": pool})
        return config


SIDES = (Role.PRODUCER, Role.CONSUMER)


def pool_bytes(config: Config, emulation: Emulation) -> int:
    """Segments that each hold a slot of full packs, as launch asks for; with whole steps in the pool, all of a step."""
    layout = emulation.layout(Role.CONSUMER)
    slots = emulation.backbone.packs + 2 if EXCHANGES[config.exchange].whole_steps else 0
    segment = to_pages(pack_room(config, emulation.shape).segment_bytes(packs_together(layout, slots)))
    owners = emulation.layout(Role.PRODUCER).dp_degree
    if config.allocation.replan == "auto":
        owners = config.allocation.max_producers or 2 * owners
    return owners * segment


def write_rows(rows: Iterable[SampleMeta], path: Path) -> Path:
    """The file from which readers have sizes, in the form of `flowtrain data scan`."""
    lines = (json.dumps(row_sizes(row._replace(row=number))) for number, row in enumerate(rows))
    write_atomic(path, "\n".join(lines) + "\n")
    return path


@cache
def _stats(trace: Path) -> DataStats:
    return read_stats(trace)
