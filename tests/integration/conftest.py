"""One Ray node with a process for every rank that a test may ask for, shared by the whole session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowtrain.config.loading import load_config
from flowtrain.config.schema import ClusterConfig, Config
from flowtrain.plan import RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import Role

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ("telemetry.progress=off", "checkpoint.export=false", "cluster.oversubscribe=true")


@pytest.fixture(scope="session")
def actors() -> Iterator[RayExecutor]:
    """One reader, two producers and two consumers; a run takes those that its plan needs."""
    ranks = [RankPlan(Role.READER, 0, "cpu", 1)]
    ranks += [RankPlan(role, rank, "cpu", 1) for role in (Role.PRODUCER, Role.CONSUMER) for rank in range(2)]
    cluster = Cluster(ClusterConfig())
    cluster.start(ranks)
    executor = RayExecutor(cluster, start_timeout_seconds=120)
    try:
        executor.start(ranks)
        yield executor
    finally:
        executor.close()
        cluster.close()


def make_config(example: str, run_dir: Path, *overrides: str) -> Config:
    """An example's config with a run folder of its own; one thread for each process."""
    path = EXAMPLES / example / f"{example}.yaml"
    return load_config(path, [*QUIET, f"run.dir={run_dir}", *overrides]).config


Train = Callable[..., Path]


@pytest.fixture
def train(actors: RayExecutor, tmp_path: Path) -> Train:
    """`train("emoji", "train.max_steps=2", name="a", dump=True)` runs to the end and returns the run's folder."""

    def run(example: str, *overrides: str, name: str = "run", resume: Path | None = None, dump: bool = False) -> Path:
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        config = make_config(example, run_dir, *overrides)
        colocated = config.placement == "colocated"
        execute(config, run_dir, resume, StopRequest(60), dump=dump, executor=None if colocated else actors)
        return run_dir

    return run


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path, str], Path]:
    """A copy of a run's folder, to continue from the same state twice."""

    def copy(run_dir: Path, name: str) -> Path:
        return Path(shutil.copytree(run_dir, tmp_path / name))

    return copy
