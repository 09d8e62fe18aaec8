"""What all tests share: one thread a process, the example jobs' paths, a longer time-out where real processes start.

The thread count is set before any test imports torch: two cores are shared by several processes, and sums of floats
differ in their last bit with the number of threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_nvml
import pytest

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a wrong test
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A shell starts what it puts in the background with SIGINT ignored; what the tests start and interrupt must not be.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
INTEGRATION_TIMEOUT_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(INTEGRATION_TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def digits() -> Path:
    """`examples/digits`: digits.yaml, model/, data/{train,test}.parquet (one picture a row)."""
    return ROOT / "examples/digits"


@pytest.fixture(scope="session")
def emoji() -> Path:
    """`examples/emoji`: emoji.yaml, model/, data/{train,test}.jsonl (0 to 24 pictures a row)."""
    return ROOT / "examples/emoji"


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library in the place of NVIDIA's (`fake_nvml`)."""
    folder = tmp_path_factory.mktemp("nvml")
    fake_nvml.build(folder)
    return folder


@pytest.fixture(autouse=True)
def directories_are_sound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test did with the pool's directories, their invariants hold after it."""
    from flowtrain.pool.directory import Directory

    made: deque[Directory] = deque(maxlen=100)
    initialize = Directory.__init__

    def remember(directory: Directory, segments: Mapping[int, int], *rest: Any, **named: Any) -> None:
        initialize(directory, segments, *rest, **named)
        made.append(directory)

    monkeypatch.setattr(Directory, "__init__", remember)
    yield
    for directory in made:
        directory.assert_invariants()


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`file_system("16m")`: a folder that has no room for more than so much; only root can make one."""
    folder = tmp_path / "disk"

    def make(size: str) -> Path:
        folder.mkdir()
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, timeout=20, check=False).returncode:
            pytest.skip("a small file system can be mounted by root only")
        return folder

    yield make
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)
