"""How evenly composed steps load the ranks: `python -m benchmarks.packing --json FILE --check`.

Real row sizes (`benchmarks/traces`) are composed by every policy for several numbers of ranks and packs, and measured
by `flowtrain.packing.measure` beside the lower bounds of `flowtrain.packing.bounds`. Costs are those of a 7B model.

| part | rows | runs |
|---|---|---|
| policies | two mixtures, cap a quarter above the longest row | all policies |
| strict | the same, cap = nominal length | `dynamic` |
| scale | the same, up to 512 ranks (`--full`: 8 packs each) | `dynamic` |
| blocked | the same, long runs of one source | `dynamic` |
| rows | steps of a given number of rows | `dynamic` |
| single | data sets of one kind | all policies that look at cost |

verl's and TRL's own functions run on the same rows where they are installed (`--peers FOLDER`).
`--trace FILE` takes another file instead (`--cap`, else a quarter above its longest row); `--order` its order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.packing_peers import PEERS, peer_figures
from benchmarks.packing_runs import TRACES, Run, Trace, figures, load
from benchmarks.record import Check, Result, main
from flowtrain.packing import POLICIES
from flowtrain.packing.trace import Order
from flowtrain.types import SampleMeta

MIXTURES = (
    Trace("mix_sft_8k", TRACES / "mix_sft_8k.parquet", 10_240, 8_192),
    Trace("mix_long_32k", TRACES / "mix_long_32k.parquet", 40_960, 32_768, high_resolution=True),
)
SINGLES = (
    Trace("servegen_mm_image", TRACES / "servegen_mm_image.parquet", 40_960, 32_768),
    Trace("mathvision_cot", TRACES / "mathvision_cot.parquet", 20_480, 16_384, high_resolution=True),
    Trace("opencqa_chart", TRACES / "opencqa_chart.parquet", 5_120, 4_096),
    Trace("nextqa_video_qa", TRACES / "nextqa_video_qa.parquet", 40_960, 32_768, high_resolution=True),
)
LEAST_U = {"mix_sft_8k": 0.968, "mix_long_32k": 0.992}
Rows = list[dict[str, Any]]


def steps_for(num_packs: int) -> int:
    """Fewer steps where one has many packs: each is an average by itself."""
    return 40 if num_packs <= 64 else 12 if num_packs <= 512 else 4


def mixtures(trace: Trace, order: Order, seed: int, full: bool, peers: Path | None) -> tuple[Rows, list[Check]]:
    """Parts `policies`, `strict`, `scale`, `blocked` and `rows` on one trace."""
    rows = load(trace, order, seed)
    table: Rows = []

    def run(policy: str, ranks: int, packs: int, cap: int, given: int | None = None) -> dict[str, Any]:
        steps = steps_for(ranks * packs)
        found = figures(Run(trace.name, cap, order, policy, ranks, packs, steps, given), rows)
        table.append(found)
        return found

    small = ((8, 1), (8, 4), (64, 1), (64, 4))
    large = ((8, 8), (64, 8), (512, 1), (512, 4), (512, 8)) if full else ((8, 8), (64, 8), (512, 1), (512, 4))
    for ranks, packs in small:
        for policy in POLICIES:
            if policy != "dynamic":
                run(policy, ranks, packs, trace.cap)
    for name, make in PEERS.items():
        if (pack := make(peers)) is None:
            print(f"{name}: not installed, left out")
            continue
        for ranks, packs in small:
            peer = Run(trace.name, trace.cap, order, name, ranks, packs, 6)
            table.append(peer_figures(name, pack, peer, rows, peer.steps))
    ours = [run("dynamic", ranks, packs, trace.cap) for ranks, packs in (*small, *large)]
    strict = [run("dynamic", ranks, packs, trace.strict) for ranks, packs in small]
    mean = sum(row.tokens for row in rows) / len(rows)
    given = [
        run("dynamic", ranks, packs, trace.cap, int(0.9 * ranks * packs * trace.cap / mean)) for ranks, packs in small
    ]
    return table, checks(trace.name, order, ours, strict, given)


def checks(name: str, order: Order, ours: Rows, strict: Rows, given: Rows) -> list[Check]:
    """The limits on `dynamic`."""

    def worst(found: Rows, column: str) -> float:
        return max(row[column] for row in found)

    def of_packs(found: Rows, packs: int) -> Rows:
        return [row for row in found if row["packs"] == packs]

    what = f"{name}, {order}: "
    if order == "blocked":
        return [
            Check(what + "microbatch, worst step", worst(ours, "microbatch_worst"), "<=", 1.05),
            Check(what + "steps of given rows, microbatch, mean", worst(given, "microbatch"), "<=", 1.05),
            Check(what + "longest wait, steps", worst([*ours, *given], "wait"), "<=", 6),
        ]
    limits = [
        Check(what + "microbatch, mean", worst(ours, "microbatch"), "<=", 1.005),
        Check(what + "microbatch, worst step", worst(ours, "microbatch_worst"), "<=", 1.02),
        Check(what + "lock-step", worst(ours, "lock_step"), "<=", 1.003),
        Check(what + "step", worst(ours, "step"), "<=", 1.003),
        Check(what + "strict cap, lock-step, 4 packs", worst(of_packs(strict, 4), "lock_step"), "<=", 1.005),
        Check(what + "strict cap, lock-step, 1 pack", worst(of_packs(strict, 1), "lock_step"), "<=", 1.010),
        Check(what + "strict cap, longest wait, steps", worst(strict, "wait"), "<=", 8),
        Check(what + "steps of given rows, microbatch, mean", worst(given, "microbatch"), "<=", 1.02),
        Check(what + "steps of given rows, packs above the fewest", fewest_lost(given), "<=", 0.0),
        Check(what + "longest wait, steps", worst([*ours, *given], "wait"), "<=", 4),
    ]
    if name in LEAST_U:
        limits.append(Check(what + "U", min(row["U"] for row in ours), ">=", LEAST_U[name]))
    for num_packs, most in ((256, 15.0), (2048, 200.0)):
        timed = [row["cpu_ms"] for row in ours if row["ranks"] * row["packs"] == num_packs]
        if timed:
            limits.append(Check(what + f"CPU ms a step, {num_packs} packs", max(timed), "<=", most))
    return limits


def fewest_lost(given: Rows) -> float:
    """Packs a rank above the fewest that hold the tokens, at most: rows of a step come to `fill` of its packs."""
    return max(row["packs_a_rank"] - max(1, -(-row["fill"] * row["packs_a_rank"] // 1)) for row in given)


def single(trace: Trace, seed: int) -> tuple[Rows, list[Check]]:
    """Part `single`: one data set, 64 ranks."""
    rows = load(trace, "random", seed)
    table: Rows = []
    limits = []
    for packs in (1, 4):
        found = {
            policy: figures(Run(trace.name, trace.cap, "random", policy, 64, packs, 12), rows) for policy in POLICIES
        }
        table += found.values()
        ours = found.pop("dynamic")
        what = f"{trace.name}, {packs} packs: "
        best = min(row["lock_step"] for row in found.values())
        best_u = max(row["U"] for row in found.values())
        limits += [
            Check(what + "lock-step", ours["lock_step"], "<=", 1.012),
            Check(what + "lock-step behind the best other policy", ours["lock_step"] - best, "<=", 0.001),
            Check(what + "U behind the best other policy", best_u - ours["U"], "<=", 0.001),
        ]
    return table, limits


def other(path: Path, cap: int | None, high_resolution: bool) -> Trace:
    """A file of the user's, packs a quarter longer than its longest row unless a cap is given."""
    longest = max(row.tokens for row in _rows(path, high_resolution))
    return Trace(path.stem, path, cap or longest * 5 // 4, min(cap or longest, longest), high_resolution)


def _rows(path: Path, high_resolution: bool) -> Sequence[SampleMeta]:
    return load(Trace(path.stem, path, 2**40, 2**40, high_resolution), "file", 0)


def measure(options: argparse.Namespace) -> Result:
    table: Rows = []
    limits: list[Check] = []

    def add(found: tuple[Rows, list[Check]]) -> None:
        table.extend(found[0])
        limits.extend(found[1])

    orders: tuple[Order, ...] = (options.order,) if options.order else ("random", "blocked")
    traces = MIXTURES if options.trace is None else (other(options.trace, options.cap, options.high_resolution),)
    for trace in traces:
        for order in orders:
            add(mixtures(trace, order, options.seed, options.full, options.peers))
    if options.trace is None and options.order is None:
        for trace in SINGLES:
            add(single(trace, options.seed))
    settings = {
        "traces": [f"{trace.name}: cap {trace.cap}, strict {trace.strict}" for trace in traces],
        "orders": list(orders),
        "lookahead": 3,
        "cost": "7B reference",
        "full": options.full,
    }
    return Result(settings, table, limits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--trace", type=Path, help="file of row sizes; default: the mixtures and the data sets of one kind"
    )
    parser.add_argument(
        "--cap", type=int, help="most tokens of a pack, for --trace; default: a quarter above its longest row"
    )
    parser.add_argument("--high-resolution", action="store_true", help="sizes of --trace by its high-resolution rule")
    parser.add_argument(
        "--order", choices=("random", "blocked", "file"), help="of the rows; default: random and blocked"
    )
    parser.add_argument("--peers", type=Path, help="folder with verl and trl, where they are not installed")
    parser.add_argument("--full", action="store_true", help="also 4,096 packs a step")
    main("packing", measure, parser)
