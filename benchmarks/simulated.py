"""Plans solved and played by the simulator, for `benchmarks.whatif`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flowtrain.allocator.candidates import WHOLE
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import HARDWARE, NodePool
from flowtrain.allocator.policies import POLICIES
from flowtrain.allocator.problem import Question
from flowtrain.allocator.solve import Choice
from flowtrain.allocator.stats import TRAINED_SHARE, DataStats, read_stats
from flowtrain.config.modes import MODES, ModeName
from flowtrain.data.order import Order
from flowtrain.packing.trace import in_order
from flowtrain.plan import layout_text
from flowtrain.runtime.collector import rare_collection
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.simulator import Disturbances, Outcome, Simulation
from flowtrain.simulator.planned import Options, Planned, planned, with_patches
from flowtrain.sizes import read_trace
from flowtrain.types import Module, SampleMeta, SkippedRow, Step

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "benchmarks/traces/mix_sft_8k.parquet"
PACK_TOKENS = 8192
FROZEN = frozenset({Module.ENCODER, Module.PROJECTOR})


@dataclass(frozen=True, slots=True)
class Case:
    """A plan and its simulation. `predicted`: samples/s by the allocator's sums; `rows`: in order, as `judged`."""

    planned: Planned
    layouts: str
    predicted: float
    rows: Sequence[SampleMeta | SkippedRow]

    def steps(self) -> Iterator[Step]:
        """Without end."""
        return self.planned.steps(self.rows, Order(len(self.rows), seed=0, shuffle=False))

    def play(
        self, num_steps: int, disturbances: Disturbances | None = None, steps: Iterable[Step] | None = None
    ) -> Outcome:
        """`steps`: composed before, as several cases of one plan have the same."""
        with rare_collection():
            steps = self.steps() if steps is None else steps
            return Simulation(self.planned.system, self.planned.timing, steps, disturbances).run(num_steps)


@cache
def trace_rows(shape: ModelShape, seed: int = 0) -> Sequence[SampleMeta]:
    """Rows of the trace with this model's patches."""
    rows, sources = read_trace(TRACE, trained_share=TRAINED_SHARE)
    return in_order(with_patches(rows, shape), sources, "random", seed)


@cache
def trace_stats() -> DataStats:
    return read_stats(TRACE)


def public_model(name: str) -> ModelShape:
    """A folder of `examples/plans`."""
    return read_shape(ROOT / "examples/plans" / name)


def scaling_samples(devices: int) -> int:
    """Of a step: 16 packs for every 40 devices, one replica of a 72B backbone."""
    return round(devices / 40 * 16 * PACK_TOKENS * 0.95 / float(trace_stats().lengths.mean()))


def question(
    shape: ModelShape,
    devices: int,
    frozen: frozenset[Module] = frozenset(),
    device: str = "h100",
    step_samples: int | None = None,
    stats: DataStats | None = None,
) -> Question:
    node = HARDWARE[device]
    return Question(
        shape,
        stats or trace_stats(),
        frozen,
        (NodePool(node, devices // node.devices),),
        step_samples=step_samples,
        pack_tokens=(PACK_TOKENS,),
    )


def case(
    asked: Question,
    mode: ModeName = "flow",
    rows: Sequence[SampleMeta] | None = None,
    choices: Sequence[Choice] | None = None,
    **options: Any,
) -> Case:
    """The plan that the mode's policy makes, or the one given, ready to be played under the mode."""
    chosen = MODES[mode]
    asked = replace(asked, placements=frozenset({chosen.placement}))
    problem = asked.problem()
    predicted = 0.0
    if choices is None:
        found = POLICIES[chosen.allocation](problem, device_bytes, WHOLE)
        assert found is not None, f"{mode} on {asked.cluster} does not fit"
        choices, predicted = found.choices, found.rate
    made = planned(
        asked,
        problem.job,
        choices,
        Options(**{"exchange": chosen.exchange, "composition": chosen.composition, **options}),
    )
    layouts = ", ".join(f"{choice.load.name} {layout_text(choice.candidate.layout)}" for choice in choices)
    return Case(made, layouts, predicted, made.judged(rows if rows is not None else trace_rows(asked.shape)))
