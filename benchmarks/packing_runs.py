"""Traces composed into steps: the runs of `benchmarks.packing`.

    trace ─▶ rows in a seeded order, over and over ─▶ blocks ─▶ Composer ─▶ steps, CPU seconds of each

CPU time is that of adding blocks of rows and composing, of this thread, as the driver of a run does both; the rows of
the trace themselves are made outside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from flowtrain.data.order import Order as RowOrder
from flowtrain.data.stream import BLOCK_ROWS
from flowtrain.packing import Composer, CompositionSpec, CostModel
from flowtrain.packing.cost import SHIFT, reference_pairs
from flowtrain.packing.measure import measure
from flowtrain.packing.trace import Order, in_order
from flowtrain.runtime.collector import rare_collection
from flowtrain.sizes import read_trace
from flowtrain.types import SampleMeta, Step

TRACES = Path(__file__).resolve().parent / "traces"
OVERHEAD_TOKENS = 300
"""What a microbatch costs beside its rows, in tokens: about 20 ms of an H100 on a 7B model."""

COST = CostModel.reference()
OVERHEAD = OVERHEAD_TOKENS * COST.token >> SHIFT


@dataclass(frozen=True, slots=True)
class Trace:
    """A file of row sizes, the cap of its packs, and a cap that its longest row just fits."""

    name: str
    path: Path
    cap: int
    strict: int
    high_resolution: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace: `rows` of a step, or `packs` a rank."""

    trace: str
    cap: int
    order: Order
    policy: str
    ranks: int
    packs: int
    steps: int
    rows: int | None = None
    lookahead: int = 3


def load(trace: Trace, order: Order, seed: int) -> list[SampleMeta]:
    """Rows that fit the cap, in order."""
    rows, sources = read_trace(trace.path, trace.high_resolution, pairs=reference_pairs)
    kept = [(row, source) for row, source in zip(rows, sources, strict=True) if row.tokens <= trace.strict]
    return in_order([row for row, _ in kept], [source for _, source in kept], order, seed)


def spec_of(run: Run, rows: Sequence[SampleMeta]) -> CompositionSpec:
    return CompositionSpec(
        num_rows=len(rows),
        step_samples=run.rows,
        step_packs=run.packs if run.rows is None else None,
        policy=run.policy,
        max_tokens=run.cap,
        lookahead=run.lookahead,
        num_consumers=run.ranks,
        num_producers=max(1, run.ranks // 4),
        trainable_encoder=True,
        max_unit_patches=16384,
        max_pack_vision_bytes=2**40,
        horizon=None,
        block_bytes=_block_bytes,
    )


def _block_bytes(tokens: int, patches: int) -> int:
    return 7168 * tokens


def compose(spec: CompositionSpec, rows: Sequence[SampleMeta], num_steps: int) -> tuple[list[Step], list[float]]:
    """Steps and the CPU seconds of each."""
    composer, waiting = Composer(spec, COST), RowOrder(len(rows), seed=0, shuffle=False).rows(rows)
    steps: list[Step] = []
    seconds: list[float] = []
    spent = 0.0
    gc.collect()
    with rare_collection():
        while len(steps) < num_steps:
            num_blocks = -(-composer.wants() // BLOCK_ROWS)
            blocks = [list(islice(waiting, BLOCK_ROWS)) for _ in range(num_blocks)]
            start = time.thread_time()
            for block in blocks:
                skipped = composer.add(block)
                assert not skipped, skipped
            step = None if composer.wants() else composer.next()
            spent += time.thread_time() - start
            if step is not None:
                steps.append(step)
                seconds.append(spent)
                spent = 0.0
    return steps, seconds


def figures(run: Run, rows: Sequence[SampleMeta]) -> dict[str, Any]:
    """One row of the table."""
    spec = spec_of(run, rows)
    steps, seconds = compose(spec, rows, run.steps)
    found = measure(steps, spec, OVERHEAD, COST)
    return {
        "trace": run.trace,
        "cap": run.cap,
        "order": run.order,
        "rows": run.rows or "-",
        "ranks": run.ranks,
        "packs": run.packs,
        "policy": run.policy,
        "step": found.step,
        "lock_step": found.lock_step,
        "lock_step_bound": found.lock_step_bound,
        "microbatch": found.microbatch,
        "microbatch_worst": found.worst_microbatch,
        "microbatch_bound": found.microbatch_bound,
        "U": found.utilisation,
        "fill": found.fill,
        "packs_a_rank": found.packs_per_rank,
        "producers": found.encode_imbalance,
        "wait": found.longest_wait,
        # Without the first step, which fills the whole window.
        "cpu_ms": 1000 * median(seconds[1:] or seconds),
    }
