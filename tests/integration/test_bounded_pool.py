"""A slow consumer: producers stall, and the pool's memory, measured from outside, keeps to its bound (contract C6)."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
from launched import Launch

from flowtrain.pool.registry import listed

MIB = 2**20


def segment_pages(*processes: psutil.Process) -> int:
    """Bytes of the pages of all pool segments that these have open, as the kernel counts them, each segment once."""
    pages = {}
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith("/memfd:"):
                    status = os.stat(link)
                    pages[status.st_ino] = status.st_blocks * 512
    return sum(pages.values())


def test_frozen_encoder_runs_ahead_to_the_bound_and_stalls_there(tmp_path: Path) -> None:
    """The consumer is slowed and the pool holds less than two steps: nothing but its bound can stop the producer."""
    pool_bytes = 5 * MIB
    overrides = ("train.freeze=[encoder]", f"pool.bytes={pool_bytes}", "packing.max_tokens=512", "packing.lookahead=1")
    slowed = "debug.delays.consumer_pack_ms={0: 25}"
    with Launch("emoji", tmp_path / "run", *overrides, slowed, "train.step={samples: 32}") as launch:
        launch.until_step(2)
        producer, consumer = launch.stage("producer-0"), launch.stage("consumer-0")
        pages, used = [], []
        for step in range(3, 13):
            launch.until_step(step)
            pages.append(segment_pages(producer, consumer))
            used += [one.used_bytes for one in listed() if one.entry.run_dir == str(launch.run_dir)]
        records = [record for record in launch.metrics() if record["step"] > 2]
        launch.signal(signal.SIGINT)
        assert launch.end(within=15) == 130, launch.err
        last = launch.metrics()[-1]["step"]
        assert launch.checkpoints() == [last]
    assert set(pages) == {pool_bytes}, "a segment has all of its pages from the start, and never more"
    assert 0.8 * pool_bytes < max(used) <= pool_bytes
    occupancies = [record["pool/occupancy(%)"] for record in records]
    assert max(occupancies) > 80, "the producer never came near the bound"
    assert max(occupancies) <= 100
    stalled = sum(record["flow/stall(s)"] for record in records)
    starved = sum(record["flow/starvation(s)"] for record in records)
    assert stalled > 4 * starved, f"stalled for {stalled} s, starved for {starved} s"
