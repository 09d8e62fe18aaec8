"""What is emulated, as one JSON file in the run's folder: modules on their devices, the two scales, jitter.

The file says all that a device needs to know how long its work lasts; a resumed run reads it again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flowtrain.allocator import Inventory, local_inventory, make_plan
from flowtrain.allocator.hardware import Cluster, NodePool, node_type
from flowtrain.allocator.load import Candidate, ModuleLoad
from flowtrain.allocator.solve import Choice
from flowtrain.allocator.throughput import Job
from flowtrain.config.schema import Config
from flowtrain.emulate.seconds import Seconds
from flowtrain.plan import Layout, Plan
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.simulator.device_timing import DeviceTiming
from flowtrain.sizes import read_sizes
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.mfu import Peak
from flowtrain.types import Cut, FeatureSpec, Role, SampleMeta

FILE = "emulation.json"


@dataclass(frozen=True, slots=True)
class ScaledShape(ModelShape):
    """A model whose features are `byte_scale` times as wide: everything else is that of the model."""

    byte_scale: float = 1.0

    def features(self, cut: Cut) -> tuple[FeatureSpec, ...]:
        whole = ModelShape.features(self, cut)
        return tuple(spec._replace(width=max(1, round(spec.width * self.byte_scale))) for spec in whole)


@dataclass(frozen=True, slots=True)
class Emulation:
    """Modules on devices of one kind.

    Attributes:
        model: folder with the model's config.json.
        device, nodes, devices_per_node: what is emulated, by its name in the table of hardware.
        choices: the encoder's, where it has one, and the backbone's.
        time_scale: real seconds that a modelled second lasts.
        byte_scale: width of features, and number of token ids, in the pool and on the way, over those of the model.
        jitter: standard deviation of the logarithm of each piece of work; `seed` of its draws.
    """

    model: str
    device: str
    nodes: int
    devices_per_node: int
    choices: tuple[Choice, ...]
    job: Job
    cut: Cut
    time_scale: float
    byte_scale: float
    jitter: float
    seed: int

    @property
    def cluster(self) -> Cluster:
        node = replace(node_type(self.device), devices=self.devices_per_node)
        return (NodePool(node, self.nodes),)

    @property
    def shape(self) -> ScaledShape:
        whole = read_shape(Path(self.model))
        given = {field.name: getattr(whole, field.name) for field in fields(ModelShape)}
        return ScaledShape(**given, byte_scale=self.byte_scale)

    @property
    def backbone(self) -> Choice:
        return next(choice for choice in self.choices if choice.load.role is Role.CONSUMER)

    @property
    def encoder(self) -> Choice:
        """The one encoder; where the data have no image, the backbone's devices stand for it."""
        return next((choice for choice in self.choices if choice.load.role is Role.PRODUCER), self.backbone)

    @property
    def colocated(self) -> bool:
        return self.encoder.group == self.backbone.group

    @property
    def num_devices(self) -> int:
        return sum({choice.group: choice.candidate.devices for choice in self.choices}.values())

    @property
    def devices_per_rank(self) -> int:
        """Devices that a rank of the run stands for: colocated sides have no cut layouts, so a rank is a replica."""
        return self.backbone.candidate.devices // self.backbone.candidate.replicas if self.colocated else 1

    def layout(self, role: Role) -> Layout:
        """Of the run's ranks of a side."""
        backbone = self.backbone.candidate
        if not self.colocated:
            return (backbone if role is Role.CONSUMER else self.encoder.candidate).layout
        if role is Role.PRODUCER:
            return Layout(dp_replicate=backbone.replicas)
        return Layout(dp_replicate=backbone.dp_replicate, dp_shard=backbone.dp_shard)

    def plan(self, config: Config) -> Plan:
        """What `make_plan` says of the config with as many GPUs as are emulated, in the memory of this machine."""
        here = local_inventory()
        there = Inventory(here.cpus, 2 * self.num_devices, here.memory_bytes, here.shm_bytes)
        plan = make_plan(config, self.shape, there)
        return replace(plan, consumers=replace(plan.consumers, layout=self.layout(Role.CONSUMER)))

    def rows(self, path: Path) -> list[SampleMeta]:
        """Of a file that `write_rows` (`flowtrain/emulate/case.py`) has written: all of them can be used."""
        found = read_sizes(path, pairs=self.shape.vision.attended_pairs)
        return [row for row in found if isinstance(row, SampleMeta)]

    def seconds(self) -> Seconds:
        timing = DeviceTiming.of_choices(self.choices, self.cluster, self.job, self.shape, self.cut)
        return Seconds(timing, self.time_scale, self.jitter, self.seed)

    def peak(self, role: Role) -> Peak:
        """Of a rank, in FLOP/s of real time: MFU is then that of the devices."""
        share = self.devices_per_rank / self.time_scale
        return Peak(share * self.cluster[0].node.peak(self.job.dtype), f"{self.device}, emulated")

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / FILE, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Emulation:
        data: dict[str, Any] = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        data["choices"] = tuple(_choice(of) for of in data["choices"])
        job: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data["job"].items()
        }
        data["job"], data["cut"] = Job(**job), Cut(data["cut"])
        return cls(**data)


def _choice(data: dict[str, Any]) -> Choice:
    load = {**data["load"], "role": Role(data["load"]["role"])}
    return Choice(**{**data, "load": ModuleLoad(**load), "candidate": Candidate(**data["candidate"])})


def choices_text(choices: Sequence[Choice]) -> str:
    """Modules and their layouts, for tables."""
    from flowtrain.plan import layout_text

    return ", ".join(f"{choice.load.name} {layout_text(choice.candidate.layout)}" for choice in choices)
