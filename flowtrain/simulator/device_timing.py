"""Seconds by the allocator's throughput model of a named device, for each unit and pack as it is (pure).

A pack's rows and FLOPs are its own, those of a mean sample are not used; what a candidate makes of them is
`allocator.throughput.beats`. An encoder's forward is what it would take if nothing trained; the rest is its backward.
A colocated rank has the devices of one backbone replica and runs as many encoder replicas on them as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain.allocator.hardware import Cluster, NodeType
from flowtrain.allocator.load import Candidate, CandidateTable, Floats
from flowtrain.allocator.solve import Choice
from flowtrain.allocator.throughput import Job, Work, beats, step_end
from flowtrain.errors import PlanError
from flowtrain.flops import patch_flops
from flowtrain.shapes import ModelShape
from flowtrain.simulator.timing import StepSeconds
from flowtrain.types import Cut, Role, SampleMeta, Step

Sizes = tuple[float, float, float, float]
"""Rows, and FLOPs of one forward: matrix products, attention, outside of the layers."""


class Counter:
    """Rows and FLOPs of samples on either side of the cut; each size of an image or sample is counted once."""

    def __init__(self, shape: ModelShape, cut: Cut) -> None:
        self._shape, self._before = shape, cut is Cut.BEFORE_PROJECTOR
        self._images: dict[tuple[int, int], Sizes] = {}
        self._lengths: dict[int, float] = {}

    def unit(self, samples: Iterable[SampleMeta]) -> Sizes:
        """The encoder's, of all images."""
        sizes = [self._image(image.patches, image.tokens) for sample in samples for image in sample.images]
        return _sum(sizes)

    def pack(self, samples: Iterable[SampleMeta]) -> Sizes:
        """The backbone's."""
        text = self._shape.text
        tokens = trained = vision = 0
        pairs = 0.0
        for sample in samples:
            tokens += sample.tokens
            trained += sample.trained_tokens
            vision += sample.vision_tokens
            pairs += self._pairs(sample.tokens)
        outer = 2.0 * text.head_weights * trained
        if self._before:
            outer += 2.0 * self._shape.projector.weights * vision
        linear = (2.0 * text.token_weights + text.state_flops) * tokens
        return float(tokens), linear, 4.0 * text.attention_width * pairs, outer

    def _image(self, patches: int, tokens: int) -> Sizes:
        found = self._images.get((patches, tokens))
        if found is None:
            vision = self._shape.vision
            rows = float(vision.rows(patches))
            outer = patch_flops(vision) * patches
            if not self._before:
                outer += 2.0 * vision.projector.weights * tokens
            attention = 4.0 * vision.attention_width * vision.attended_pairs(patches)
            found = self._images[patches, tokens] = (rows, 2.0 * vision.token_weights * rows, attention, outer)
        return found

    def _pairs(self, length: int) -> float:
        found = self._lengths.get(length)
        if found is None:
            found = self._lengths[length] = self._shape.text.attended_pairs(length)
        return found


def _sum(sizes: list[Sizes]) -> Sizes:
    rows, linear, attention, outer = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0.0,) * 4
    return rows, linear, attention, outer


@dataclass(frozen=True, slots=True)
class Side:
    """One module under its candidate, on its kind of node. `share`: of a rank's work that one replica does."""

    choice: Choice
    node: NodeType
    job: Job
    share: float = 1.0

    @property
    def candidate(self) -> Candidate:
        return self.choice.candidate

    def seconds(self, sizes: list[Sizes], forward_only: bool = False) -> Floats:
        """Of each entry; one without rows takes none."""
        load = self.choice.load
        if forward_only:
            load = replace(load, linear_passes=1, attention_passes=1, trained_parameters=0)
        columns = np.array(sizes, dtype=np.float64).reshape(-1, 4).T
        work = Work(*(self.share * column for column in np.where(columns[0] > 0, columns, 1.0)))
        found: Floats = np.where(columns[0] > 0, beats(load, self._table(), self.node, self.job, work), 0.0)
        return found

    def step_end(self) -> tuple[float, float]:
        """Seconds of the reduction beyond what a mean pack hides, and of the optimizer."""
        load = self.choice.load
        per_pack = self.job.step_samples / self.candidate.replicas / max(1, self.choice.packs)
        work = Work(
            *(
                np.array([per_pack * value])
                for value in (load.tokens, load.linear_flops, load.attention_flops, load.outer_flops)
            )
        )
        table = self._table()
        reduction, optimizer = step_end(load, table, self.node, beats(load, table, self.node, self.job, work))
        return float(reduction[0]), float(optimizer[0])

    def _table(self) -> CandidateTable:
        return CandidateTable.of([self.candidate])

    def flops(self, sizes: list[Sizes]) -> float:
        """Forward and backward of all entries."""
        load = self.choice.load
        _, linear, attention, outer = _sum(sizes)
        return load.linear_passes * (linear + outer) + load.attention_passes * attention


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """`encoder` is None where the data have no images."""

    counter: Counter
    encoder: Side | None
    backbone: Side
    ends: dict[Role, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of_choices(
        cls, choices: Sequence[Choice], cluster: Cluster, job: Job, shape: ModelShape, cut: Cut
    ) -> DeviceTiming:
        """Of a plan with at most one encoder, for pictures; `PlanError` for others."""
        encoders = [choice for choice in choices if choice.load.role is Role.PRODUCER]
        if any(choice.load.name != shape.vision.name for choice in encoders):
            names = ", ".join(choice.load.name for choice in encoders)
            raise PlanError(
                f"the plan has devices for {names}: a simulation plays one vision encoder and the backbone; "
                f"give data without the other modalities"
            )
        backbone = next(choice for choice in choices if choice.load.role is Role.CONSUMER)
        sides = {}
        for choice in (*encoders, backbone):
            together = choice is not backbone and choice.group == backbone.group
            share = backbone.candidate.replicas / choice.candidate.replicas if together else 1.0
            sides[choice.load.role] = Side(choice, cluster[choice.pool].node, job, share)
        ends = {role: side.step_end() for role, side in sides.items()}
        return cls(Counter(shape, cut), sides.get(Role.PRODUCER), sides[Role.CONSUMER], ends)

    def of(self, step: Step) -> StepSeconds:
        units = [unit for pack in step.packs for unit in pack.units]
        unit_sizes = [self.counter.unit(unit.samples) for unit in units]
        pack_sizes = [self.counter.pack(pack.samples) for pack in step.packs]
        flops = self.backbone.flops(pack_sizes)
        encode, backward = np.zeros(len(units)), np.zeros(len(units))
        if self.encoder is not None and units:
            encode = self.encoder.seconds(unit_sizes, forward_only=True)
            backward = self.encoder.seconds(unit_sizes) - encode
            flops += self.encoder.flops(unit_sizes)
        width = len(step.slots[0])
        packs = self.backbone.seconds(pack_sizes).reshape(-1, width)
        candidate = self.backbone.candidate
        fill = packs.mean(axis=0) * (candidate.pp - 1) / candidate.vpp
        ids = [unit.id for unit in units]
        return StepSeconds(
            dict(zip(ids, encode.tolist(), strict=True)),
            dict(zip(ids, backward.tolist(), strict=True)),
            packs.tolist(),
            fill.tolist(),
            flops,
        )

    def reduce_seconds(self, role: Role) -> float:
        return self.ends.get(role, (0.0, 0.0))[0]

    def update_seconds(self, role: Role) -> float:
        return self.ends.get(role, (0.0, 0.0))[1]
