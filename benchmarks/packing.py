"""How evenly composed steps load the consumers: `python -m benchmarks.packing --json FILE --check`.

The emoji rows, with their real text and image sizes, are composed into steps by each policy for several numbers of
consumers. A step's time is predicted by the cost model in two ways of meeting:

| figure | ranks meet | value |
|---|---|---|
| `step_imbalance` | at the end of the step | max over ranks of its packs' cost / mean |
| `slot_imbalance` | in every slot | sum over slots of the dearest pack / mean rank cost |
| `over_bound` | in every slot | sum over slots of the dearest pack / a bound that no packing of these rows beats |

The bound of a step is the larger of (all costs / ranks) and (the dearest single sample).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import Check, Result, main
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.data.measure import open_measure
from flowtrain.data.order import Order
from flowtrain.data.sample import SampleBuilder
from flowtrain.data.sources import open_source
from flowtrain.packing import Composer, CompositionSpec, CostModel
from flowtrain.pool.block import block_bytes
from flowtrain.shapes import payload_bytes, read_shape
from flowtrain.types import SampleMeta, SkippedRow, Step

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/emoji/emoji.yaml"
NUM_ROWS = 1536
STEP_SAMPLES = 64
MAX_TOKENS = 1024
POLICIES = ("arrival", "dynamic")
NUM_CONSUMERS = (1, 2, 4)
LOOKAHEADS = {"arrival": (1,), "dynamic": (1, 4)}


def read_rows(config: Config, seed: int) -> list[SampleMeta | SkippedRow]:
    """The first rows of the run's order, with their real sizes."""
    source = open_source(config.data.train)
    builder = SampleBuilder(open_measure(config), source, config.data, MAX_TOKENS, "skip")
    order = Order(len(source), seed)
    built = (builder.build(position, order.row(position), 0, position) for position in range(NUM_ROWS))
    return [row if isinstance(row, SkippedRow) else row[0] for row in built]


def composer(config: Config, cost: CostModel, policy: str, lookahead: int, num_consumers: int) -> Composer:
    shape = read_shape(config.model.path)
    features = shape.features(config.cut)

    def sample_block_bytes(sample: SampleMeta) -> int:
        return block_bytes(payload_bytes(features, config.model.dtype, sample.vision_tokens, sample.patches))

    spec = CompositionSpec(
        num_rows=NUM_ROWS,
        step_samples=STEP_SAMPLES,
        step_packs=None,
        policy=policy,
        max_tokens=MAX_TOKENS,
        lookahead=lookahead,
        num_consumers=num_consumers,
        num_producers=1,
        trainable_encoder=True,
        max_unit_patches=config.producers.max_unit_patches,
        max_pack_vision_bytes=2**40,
        horizon=NUM_ROWS,
        block_bytes=sample_block_bytes,
    )
    return Composer(spec, cost)


def compose(packer: Composer, rows: list[SampleMeta | SkippedRow]) -> Iterator[Step]:
    """All steps of `rows`, in order."""
    waiting = iter(rows)
    ended = False
    while True:
        while not ended and packer.wants() > 0:
            row = next(waiting, None)
            if row is None:
                packer.end()
                ended = True
            else:
                packer.add(row)
        step = packer.next()
        if step is None:
            return
        yield step


def figures(steps: list[Step], cost: CostModel, num_consumers: int) -> dict[str, float]:
    """Means over full steps of the figures of the module's table."""
    step_imbalance, slot_imbalance, over_bound, fill = [], [], [], []
    for step in steps:
        costs = [[pack.cost for pack in slot] for slot in step.slots]
        by_rank = [sum(slot[rank] for slot in costs) for rank in range(num_consumers)]
        mean = sum(by_rank) / num_consumers
        met = sum(max(slot) for slot in costs)
        dearest = max(cost.pack_cost([sample]) for sample in step.samples)
        step_imbalance.append(max(by_rank) / mean)
        slot_imbalance.append(met / mean)
        over_bound.append(met / max(mean, dearest))
        fill.append(sum(pack.tokens for pack in step.packs) / (len(step.packs) * MAX_TOKENS))
    return {
        "packs": fmean(len(step.packs) for step in steps),
        "fill": fmean(fill),
        "step_imbalance": fmean(step_imbalance),
        "slot_imbalance": fmean(slot_imbalance),
        "over_bound": fmean(over_bound),
    }


def measure(seed: int) -> Result:
    config = load_config(EXAMPLE).config
    cost = CostModel.from_shape(read_shape(config.model.path), config.frozen, config.cut)
    rows = read_rows(config, seed)
    table: list[dict[str, Any]] = []
    for policy in POLICIES:
        for lookahead in LOOKAHEADS[policy]:
            for num_consumers in NUM_CONSUMERS:
                packer = composer(config, cost, policy, lookahead, num_consumers)
                start = time.perf_counter()
                steps = list(compose(packer, rows))
                seconds = time.perf_counter() - start
                full = [step for step in steps if step.rows == STEP_SAMPLES]
                trained = sum(step.rows for step in steps)
                assert trained == sum(isinstance(row, SampleMeta) for row in rows), "a row was lost or repeated"
                table.append(
                    {
                        "policy": policy,
                        "lookahead": lookahead,
                        "consumers": num_consumers,
                        **figures(full, cost, num_consumers),
                        "compose_ms_per_step": 1000 * seconds / len(steps),
                    }
                )
    settings = {"rows": NUM_ROWS, "step_samples": STEP_SAMPLES, "max_tokens": MAX_TOKENS, "cost": cost.to_dict()}
    return Result(settings, table, checks(table))


def checks(table: list[dict[str, Any]]) -> list[Check]:
    def row(policy: str, lookahead: int, num_consumers: int) -> dict[str, Any]:
        wanted = (policy, lookahead, num_consumers)
        return next(row for row in table if (row["policy"], row["lookahead"], row["consumers"]) == wanted)

    found = []
    for num_consumers in NUM_CONSUMERS[1:]:
        arrival, dynamic = row("arrival", 1, num_consumers), row("dynamic", 1, num_consumers)
        ratio = dynamic["slot_imbalance"] / arrival["slot_imbalance"]
        found.append(Check(f"slot imbalance, dynamic over arrival, {num_consumers} consumers", ratio, "<=", 0.9))
        found.append(Check(f"over the bound, dynamic, {num_consumers} consumers", dynamic["over_bound"], "<=", 1.1))
    slowest = max(entry["compose_ms_per_step"] for entry in table)
    found.append(Check("composition, milliseconds a step of 64 rows", slowest, "<=", 50.0))
    return found


if __name__ == "__main__":
    main("packing", measure)
