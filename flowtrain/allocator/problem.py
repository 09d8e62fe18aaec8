"""From a model, its data and a step to the problem that the search solves (pure).

| from | what |
|---|---|
| shape, data, frozen modules | loads of the modules |
| config, or what a command line says | step, packs, dtype |
| `other_data` | the same with more or fewer images, and longer: for the sensitivity of a plan |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator.hardware import Cluster, num_devices
from flowtrain.allocator.loads import loads_of
from flowtrain.allocator.solve import ANYWHERE, Problem
from flowtrain.allocator.stats import DataStats, assumed_stats
from flowtrain.allocator.throughput import Job
from flowtrain.config.schema import Config
from flowtrain.shapes import ModelShape
from flowtrain.types import Module

PACKS_PER_DEVICE = 8
"""Of a step whose size nobody gave."""
DEFAULT_PACK_TOKENS = (8192, 16384)
UNIT_SAMPLES = 4
"""An encode unit is made for so many samples of mean size where a model folder alone is planned for."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for.

    `replayed`: a trainable encoder runs again as a whole before its backward; `max_trained_tokens`: most of a pack.
    `max_row_tokens`: of the longest row that is trained, in a pack of its own where it is longer than packs are; None:
    one that fits the largest pack.
    """

    shape: ModelShape
    stats: DataStats
    frozen: frozenset[Module]
    cluster: Cluster
    dtype: str = "bfloat16"
    step_samples: int | None = None
    pack_tokens: tuple[int, ...] = DEFAULT_PACK_TOKENS
    unit_patches: int | None = None
    placements: frozenset[str] = ANYWHERE
    replayed: bool = False
    max_trained_tokens: int | None = None
    max_row_tokens: int | None = None

    @property
    def longest_row(self) -> int:
        """In tokens; a run skips longer ones."""
        return self.max_row_tokens or max(self.pack_tokens)

    @property
    def own_pack(self) -> bool:
        """Whether a row longer than a pack has one of its own."""
        return self.longest_row > max(self.pack_tokens)

    def problem(self, stats: DataStats | None = None) -> Problem:
        """Of these sizes, or of the question's own; rows that are too long are left out, as a run leaves them out."""
        stats = (stats or self.stats).within(self.longest_row)
        loads = loads_of(self.shape, stats, self.frozen, self.dtype, self.replayed)
        *encoders, backbone = loads
        loads = (*encoders, replace(backbone, own_pack=self.own_pack))
        longest = max((load.longest_tokens for load in encoders), default=1)
        mean = max((load.tokens for load in encoders), default=1.0)
        # A sample that is larger than a unit goes alone.
        unit = max(self.unit_patches or int(UNIT_SAMPLES * mean), longest)
        devices = num_devices(self.cluster)
        step = self.step_samples or max(
            256, round(PACKS_PER_DEVICE * devices * min(self.pack_tokens) / max(1.0, loads[-1].tokens))
        )
        job = Job(
            step_samples=step,
            dtype=self.dtype,
            pack_tokens=self.pack_tokens,
            unit_patches=(unit,),
            max_trained_tokens=self.max_trained_tokens,
        )
        return Problem(loads, self.cluster, job, self.placements)

    def other_data(self) -> dict[str, Problem]:
        """The problem with other samples, the step being of as many samples as before.

        The same rows are compared: where one grows beyond a pack and has none of its own, the largest packs grow with
        it.
        """
        step, kept = self.problem().job.step_samples, self.stats.within(self.longest_row)

        def other(images: float = 1.0, length: float = 1.0) -> Problem:
            stats = kept.scaled(images, length)
            longest = int(stats.lengths.max())
            *sizes, most = sorted(round(length * size) for size in self.pack_tokens)
            sizes.append(most if self.own_pack else max(most, longest))
            asked = replace(self, step_samples=step, pack_tokens=tuple(sizes), max_row_tokens=longest)
            return asked.problem(stats)

        return {
            "half as many images": other(images=0.5),
            "half as many again": other(images=1.5),
            "twice the length": other(length=2.0),
        }


def question_of(config: Config, shape: ModelShape, stats: DataStats | None, cluster: Cluster) -> Question:
    """What a config asks for; a step given in packs has as many samples as those hold on one device each.

    `stats`: sizes of its rows; None: some are assumed, in proportion to the longest that a pack may hold.
    """
    pack_tokens, longest = config.packing.max_tokens, config.max_row_tokens
    stats = stats or assumed_stats(min(pack_tokens, longest))
    step = config.train.step.samples
    if step is None:
        assert config.train.step.packs is not None
        devices = num_devices(cluster)
        # A row that has a pack of its own takes the place of a full one.
        mean = float(np.minimum(stats.within(longest).lengths, pack_tokens).mean())
        step = max(1, round(config.train.step.packs * devices * pack_tokens / mean))
    placement = config.allocation.placement
    chosen = ANYWHERE if placement == "auto" else frozenset({config.placement})
    return Question(
        shape=shape,
        stats=stats,
        frozen=config.frozen,
        cluster=cluster,
        dtype=config.model.dtype,
        step_samples=step,
        pack_tokens=(pack_tokens,),
        unit_patches=config.producers.max_unit_patches,
        placements=chosen,
        replayed=config.producers.backward == "recompute",
        max_trained_tokens=config.packing.max_trained_tokens,
        max_row_tokens=longest,
    )
