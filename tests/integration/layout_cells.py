"""Cells of the table of layouts: a family, a layout for each side and a freeze setting, proven equal to the plain loop.

All cells run in one Ray session whose processes stay: a cell costs its steps, and not the start of processes.

    with session(producers=2, consumers=4) as executor:
        outcome = verify_cell(executor, Cell("qwen3_vl", "f2", "r2f2"), folder, steps=5)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration_runs import EXAMPLES, make_config
from tiny_families import make_family

from flowtrain.config.schema import ClusterConfig
from flowtrain.plan import RankPlan, layout_of
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import Role
from flowtrain.verify.run import Outcome, check_config, compare_run

ALL, PROJECTOR, FROZEN = (), ("encoder", "backbone"), ("encoder",)
BACKBONES = ("r1", "f2", "r2f2", "t2", "t4", "c2", "p2", "f2t2", "t2p2", "f2c2")
FOUR_LAYERS = {"text_config": {"num_hidden_layers": 4}, "vision_config": {"deepstack_visual_indexes": [0, 1]}}
ONE_BY_ONE = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Families whose samples go through the backbone one by one."""


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    producers: str = "r1"
    consumers: str = "r1"
    freeze: tuple[str, ...] = ALL

    @property
    def name(self) -> str:
        frozen = "-".join(self.freeze) or "nothing"
        return f"{self.family} {self.producers} x {self.consumers}, {frozen} frozen"


INTERTWINED = ("gemma3", "llava_onevision")
"""Image blocks that attend both ways; features that depend on the rest of the row."""


def table(families: tuple[str, ...]) -> list[Cell]:
    """Every cell that is claimed, Qwen3-VL first."""
    cells = [Cell("qwen3_vl", e, b) for e in ("r1", "r2", "f2", "t2") for b in BACKBONES]
    cells += [
        Cell("qwen3_vl", e, b, freeze)
        for e, b in (("r1", "f2"), ("f2", "f2"), ("f2", "r2f2"), ("t2", "f2t2"), ("r2", "c2"), ("r2", "p2"))
        for freeze in (FROZEN, PROJECTOR)
    ]
    cells += [Cell("qwen3_vl", "r1", b) for b in ("r2p2", "f2p2", "p2c2")]
    cells += [Cell("qwen3_vl_4_layers", "r1", b) for b in ("p2v2", "t2p2v2", "p4")]
    cells += [Cell("qwen3_vl", "r2", "f2", ("backbone",))]
    for family in families:
        if family in ONE_BY_ONE:
            cells += [Cell(family), Cell(family, "f2")]
        elif family != "qwen3_vl":
            cells += [Cell(family, "r1", b) for b in ("r1", "f2", "t2", "c2", "p2")]
            cells += [Cell(family, "r1", "f2e2")] if family.endswith("_moe") else []
            cells += [Cell(family, "f2", "r1"), Cell(family, "r1", "f2", PROJECTOR)]
    for family in INTERTWINED:
        backbones = ("r1", "f2", "t2", "c2")
        cells += [Cell(family, e, b, freeze) for e in ("r1", "r2") for b in backbones for freeze in ((), PROJECTOR)]
    return list(dict.fromkeys(cells))


@contextmanager
def session(producers: int, consumers: int) -> Iterator[RayExecutor]:
    """Room for so many processes; each starts with the first run that needs it."""
    ranks = [RankPlan(Role.READER, 0, "cpu", 1)]
    ranks += [RankPlan(Role.PRODUCER, rank, "cpu", 1) for rank in range(producers)]
    ranks += [RankPlan(Role.CONSUMER, rank, "cpu", 1) for rank in range(consumers)]
    cluster = Cluster(ClusterConfig())
    cluster.start(ranks)
    executor = RayExecutor(cluster, start_timeout_seconds=120)
    try:
        yield executor
    finally:
        executor.close()
        cluster.close()


def mixed_rows(folder: Path) -> Path:
    """Emoji rows of which most have no image, so that packs, ranks and whole slots are left without one."""
    path = folder / "mixed.jsonl"
    if not path.is_file():
        source = EXAMPLES / "emoji" / "data" / "train.jsonl"
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row["images"] = [str(source.parent / image) for image in row.get("images") or []]
        chosen = [row for row in rows if row["images"]][:15] + [row for row in rows if not row["images"]][:60]
        path.write_text("\n".join(map(json.dumps, chosen)) + "\n", encoding="utf-8")
    return path


def verify_cell(executor: RayExecutor, cell: Cell, folder: Path, steps: int) -> Outcome:
    """Train and compare; `folder` keeps models and rows for later cells. Fails when every rank always had an image."""
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    models = folder / "models"
    model = models / cell.family
    if not model.is_dir():
        models.mkdir(exist_ok=True)
        make_family(cell.family.removesuffix("_4_layers"), model, FOUR_LAYERS if "_4_layers" in cell.family else None)
    overrides = (
        f"model.path={model}",
        f"data.train={mixed_rows(folder)}",
        f"producers.layout={cell.producers}",
        f"consumers.layout={cell.consumers}",
        f"train.freeze=[{', '.join(cell.freeze)}]",
        "train.step={samples: 8}",
        f"train.max_steps={steps}",
        "train.epochs=null",
        "data.eval=null",
        "model.dtype=float64",
    )
    config = make_config("emoji", run_dir, *overrides)
    execute(config, run_dir, None, StopRequest(60), dump=True, executor=executor)
    if layout_of(cell.consumers).dp_degree > 1:
        with_images, without = ranks_by_images(run_dir, mixed_rows(folder))
        assert min(with_images, without), f"{cell.name}: {with_images} times a rank had images, {without} times none"
    return compare_run(check_config(config, steps, "float64", run_dir))


def ranks_by_images(run_dir: Path, rows: Path) -> tuple[int, int]:
    """How many times a rank had images in a step, and how many times it had rows and no image."""
    pictured = {row["id"] for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()) if row["images"]}
    found: dict[tuple[int, int], bool] = {}
    for line in (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        pack = json.loads(line)
        place = pack["step"], pack["rank"]
        found[place] = found.get(place, False) or bool(pictured & set(pack["ids"]))
    with_images = sum(found.values())
    return with_images, len(found) - with_images
