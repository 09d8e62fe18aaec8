"""How well arenas place blocks, and how fast: the figures behind the choice of the pool's ring.

    python -m benchmarks.pool_arena --json FILE [--journals DIR] [--trace FILE]

| figure | what |
|---|---|
| recorded | lifetimes of `traces/pool_lifetimes.txt`, or of the `pool.csv` of every run folder in `--journals` |
| random | blocks with the sizes of the trace that end in random order: share of allocations that fail, by load |
| pairs/s | reserve + release of blocks with the sizes of the trace, one process |
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.arenas import ARENAS, LINE
from benchmarks.lifetimes import (
    MIN_LARGEST,
    Lifetimes,
    first_failing_load,
    random_lifetimes,
    read_journal,
    read_lifetimes,
    replay,
    write_lifetimes,
)
from benchmarks.record import Check, Result, main
from flowtrain.pool.block import block_bytes
from flowtrain.pool.measure import pairs_per_second

TRACES = Path(__file__).parent / "traces"
LIFETIMES = TRACES / "pool_lifetimes.txt"
TRACE = TRACES / "mix_sft_8k.parquet"
LOADS = tuple(percent / 100 for percent in range(60, 101))
RECORDED_LOAD = 0.85
RANDOM_LOADS = (0.7, 0.8, 0.85, 0.9, 0.95)
RANDOM_85 = "random, load 0.85: failures %"
TOKEN_BYTES = 2 * 3584
"""Features of one visual token for a 7 B backbone in bfloat16."""

LIMIT_PAIRS = 100_000
NUM_BLOCKS = 20_000
LIVE_BLOCKS = 400


def payload_sizes(trace: Path) -> list[int]:
    """Payload bytes of the rows with images, in the trace's order."""
    import pyarrow.parquet

    tokens = pyarrow.parquet.read_table(trace, columns=["n_vision_tokens"])["n_vision_tokens"].to_pylist()
    return [n * TOKEN_BYTES for n in tokens if n]


def arena_rows(recorded: list[Lifetimes], sizes: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """One row for each arena: loads of first failure on recorded lifetimes, shares of failures on random ones."""
    blocks = [block_bytes(size) for size in sizes]
    chosen = [random_lifetimes(seed + n, blocks, NUM_BLOCKS, LIVE_BLOCKS) for n in range(2)]
    for name, make in ARENAS.items():
        first = [first_failing_load(one, make, LOADS) for one in recorded]
        row: dict[str, Any] = {
            "arena": name,
            "recorded: first failure at load": min((load for load in first if load), default=1.0),
        }
        for load in RANDOM_LOADS:
            failures = sum(replay(one, make(one.capacity(load))) for one in chosen)
            row[f"random, load {load:g}: failures %"] = 100 * failures / (len(chosen) * NUM_BLOCKS)
        start = time.perf_counter()
        for one in recorded:
            replay(one, make(one.capacity(RECORDED_LOAD)))
        row["replay: pairs/s"] = sum(len(one.sizes) for one in recorded) / (time.perf_counter() - start)
        yield row


def lifetime_rows(recorded: list[Lifetimes]) -> Iterator[dict[str, Any]]:
    for one in recorded:
        yield {
            "segment": one.name,
            "blocks": len(one.sizes),
            "largest bytes": max(one.sizes),
            "peak / largest": one.peak_bytes / max(one.sizes),
            "failures of the ring at load 0.85": replay(one, ARENAS["ring"](one.capacity(RECORDED_LOAD))),
        }


def measure(seed: int, lifetimes: Path | None = None, trace: Path = TRACE) -> Result:
    recorded = read_lifetimes(LIFETIMES) if lifetimes is None else _journals(lifetimes)
    sizes = payload_sizes(trace)
    rows = list(arena_rows(recorded, sizes, seed))
    ring = next(row for row in rows if row["arena"] == "ring")
    speed = pairs_per_second(sizes)
    checks = [
        Check("ring_first_failing_load_recorded", ring["recorded: first failure at load"], ">=", RECORDED_LOAD),
        Check("reserve_release_pairs_per_second", speed, ">=", LIMIT_PAIRS),
    ]
    settings = {
        "segments": list(lifetime_rows(recorded)),
        "random": {"blocks": NUM_BLOCKS, "live": LIVE_BLOCKS, "token_bytes": TOKEN_BYTES},
        "min_segment": f"{MIN_LARGEST} x largest block",
        "line_bytes": LINE,
    }
    return Result(settings, rows, checks)


def _journals(folder: Path) -> list[Lifetimes]:
    files = sorted(folder.glob("*/pool.csv"))
    assert files, f"no run folder in {folder} has a pool.csv: run with debug.pool_journal: true"
    return [one for file in files for one in read_journal(file, file.parent.name)]


def run(options: argparse.Namespace) -> Result:
    if options.keep and options.journals:
        write_lifetimes(options.keep, _journals(options.journals))
    return measure(options.seed, options.journals, options.trace)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--journals", type=Path, help="folder of run folders with a pool.csv")
    parser.add_argument("--trace", type=Path, default=TRACE, help="parquet file with n_vision_tokens")
    parser.add_argument("--keep", type=Path, help="write the lifetimes of --journals to this file")
    main("pool_arena", run, parser)
