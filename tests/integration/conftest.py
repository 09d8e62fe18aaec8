"""One Ray node with a process for every rank that a test may ask for, shared by the whole session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration_runs import EXAMPLES, Train, make_config
from layout_cells import session

from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.run import execute
from flowtrain.runtime.signals import StopRequest


@pytest.fixture(scope="session")
def actors() -> Iterator[RayExecutor]:
    """A reader, two producers and four consumers at most; a run takes those that its plan needs."""
    with session(producers=2, consumers=4) as executor:
        yield executor


@pytest.fixture
def train(actors: RayExecutor, tmp_path: Path) -> Train:
    """`train("emoji", "train.max_steps=2", name="a", dump=True)` runs to the end and returns the run's folder."""

    def run(
        example: str,
        *overrides: str,
        name: str = "run",
        resume: Path | None = None,
        dump: bool = False,
        replay: Path | None = None,
    ) -> Path:
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        config = make_config(example, run_dir, *overrides)
        colocated = config.placement == "colocated"
        executor = None if colocated else actors
        execute(config, run_dir, resume, StopRequest(60), dump=dump, executor=executor, replay=replay)
        return run_dir

    return run


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path, str], Path]:
    """A copy of a run's folder, to continue from the same state twice."""

    def copy(run_dir: Path, name: str) -> Path:
        return Path(shutil.copytree(run_dir, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def text_only_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Emoji rows in which whole steps of eight rows have no image: eight rows with images, then many without.

    Rows are shuffled, so the share is what counts: with two rows in a hundred that have an image, most steps have none.
    """
    source = EXAMPLES / "emoji" / "data" / "train.jsonl"
    with_images, without = [], []
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row["images"] = [str(source.parent / image) for image in row.get("images") or []]
        (with_images if row["images"] else without).append(json.dumps(row))
    path = tmp_path_factory.mktemp("rows") / "text.jsonl"
    path.write_text("\n".join([*with_images[:6], *without[:60]]) + "\n", encoding="utf-8")
    return path
