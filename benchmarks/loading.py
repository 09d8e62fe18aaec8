"""Host memory of a rank while it loads its pieces of a backbone that is cut over four ranks.

    python -m benchmarks.loading --json FILE --check

A folder of about 200 M parameters in bfloat16 is written first; four processes load it as float32, each its quarter.

| figure | what |
|---|---|
| piece_mib | float32 bytes of the parameters that the rank holds |
| extra_mib | the most anonymous memory while loading, beyond what the process had with its libraries loaded |
| mapped_mib | the most of files mapped: page cache, shared between ranks and given back on demand; not in `extra_mib` |
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.record import Check, Result, main

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
FACTOR = 1.3
MARGIN_BYTES = 64 * 2**20
SAMPLE_SECONDS = 0.001
MIB = 2**20


def write_folder(folder: Path, seed: int) -> int:
    """A Qwen3-VL folder with a larger backbone; returns its number of parameters."""
    import torch

    from flowtrain.models.parts import build_on_meta, read_config
    from flowtrain.models.weights import write_tensors

    shutil.copytree(ROOT / "examples" / "emoji" / "model", folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content["text_config"] |= TEXT
    content["vision_config"]["out_hidden_size"] = TEXT["hidden_size"]
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in build_on_meta(read_config(folder, False), False).named_parameters()}
    tensors = {n: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for n, shape in shapes.items()}
    write_tensors(tensors, folder / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())


class Watch:
    """The most that the lines of /proc/self/status say while this is open, in bytes."""

    def __init__(self, *fields: str) -> None:
        self.most = dict.fromkeys(fields, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Watch:
        self._look()
        self.before = dict(self.most)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _look_on(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            field, _, value = line.partition(":")
            if field in self.most:
                self.most[field] = max(self.most[field], 1024 * int(value.split()[0]))


def load_rank(rank: int, folder: str, run: str) -> None:
    """One rank: join, load, write what was seen."""
    import torch
    import torch.distributed as dist

    from flowtrain.config.schema import Config
    from flowtrain.models.backbone import BackboneHalf
    from flowtrain.parallel.groups import join_groups
    from flowtrain.parallel.pieces import local_tensor
    from flowtrain.parallel.spread import SideSpread
    from flowtrain.plan import Layout

    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{run}/store", RANKS), rank=rank, world_size=RANKS, timeout=limit
    )
    cpu = torch.device("cpu")
    groups = join_groups(Layout(dp_shard=RANKS), rank, cpu, limit.total_seconds())
    data = {"train": ROOT / "examples" / "emoji" / "data" / "train.jsonl"}
    config = Config.model_validate({"model": {"path": folder}, "data": data, "consumers": {"layout": f"f{RANKS}"}})
    spread = SideSpread(groups, limit.total_seconds())
    begun = time.perf_counter()
    with Watch("RssAnon", "RssFile") as watch:
        half = BackboneHalf.load(Path(folder), Path(folder), config, cpu, "float32", spread)
    seconds = time.perf_counter() - begun
    pieces = [local_tensor(parameter) for parameter in half.parameters_by_name().values()]
    row = {
        "rank": rank,
        "piece_mib": sum(piece.numel() * piece.element_size() for piece in pieces) / MIB,
        "extra_mib": (watch.most["RssAnon"] - watch.before["RssAnon"]) / MIB,
        "mapped_mib": (watch.most["RssFile"] - watch.before["RssFile"]) / MIB,
        "seconds": seconds,
    }
    Path(run, f"rank-{rank}.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(seed: int) -> Result:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as run:
        folder = Path(run) / "model"
        parameters = write_folder(folder, seed)
        mp.start_processes(load_rank, (str(folder), run), nprocs=RANKS, join=True, start_method="spawn")
        rows: list[Mapping[str, Any]] = [
            json.loads(Path(run, f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)
        ]
    limits = [FACTOR * row["piece_mib"] + MARGIN_BYTES / MIB for row in rows]
    checks = [
        Check(f"rank {row['rank']}: extra memory, MiB", row["extra_mib"], "<=", limit)
        for row, limit in zip(rows, limits, strict=True)
    ]
    checks.append(Check("parameters, millions", parameters / 1e6, ">=", 190))
    return Result({"parameters": parameters, "layout": f"f{RANKS}", "text_config": TEXT}, rows, checks)


if __name__ == "__main__":
    main("loading", lambda options: measure(options.seed))
