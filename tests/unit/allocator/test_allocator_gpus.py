"""GPUs as NVML lists them, through nvidia-ml-py's own way of loading a library, which is a small one made here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_nvml
from busy import allowed

TOLD = """
import dataclasses, json
from flowtrain.allocator.gpus import local_gpus
gpus, why = local_gpus()
print(json.dumps([[dataclasses.asdict(gpu) for gpu in gpus], why]))
"""


def told(nvml_library: Path, control: Path, shown: str | None, **answers: int) -> Any:
    fake_nvml.answer(control, **answers)
    environment = fake_nvml.environment(nvml_library, control)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if shown is not None:
        environment["CUDA_VISIBLE_DEVICES"] = shown
    done = subprocess.run(
        [sys.executable, "-c", TOLD], env=environment, text=True, capture_output=True, timeout=allowed(30), check=True
    )
    return json.loads(done.stdout)


def test_what_each_is_and_where_it_lies(nvml_library: Path, tmp_path: Path) -> None:
    gpus, why = told(nvml_library, tmp_path / "control", None)
    assert why is None
    assert gpus == [
        {"name": "Stand-in 0", "memory_bytes": 80 * 2**30, "links": 2, "numa_node": 1},
        {"name": "Stand-in 1", "memory_bytes": 80 * 2**30, "links": 2, "numa_node": 2},
    ]


def test_only_what_is_shown_and_only_what_the_driver_tells(nvml_library: Path, tmp_path: Path) -> None:
    gpus, _ = told(nvml_library, tmp_path / "control", "1", fail_affinity=3, fail_link=3)
    assert gpus == [{"name": "Stand-in 1", "memory_bytes": 80 * 2**30, "links": 0, "numa_node": None}]


def test_none_has_a_reason(nvml_library: Path, tmp_path: Path) -> None:
    assert told(nvml_library, tmp_path / "control", "")[1] == "CUDA_VISIBLE_DEVICES hides every GPU"
    assert told(nvml_library, tmp_path / "control", None, count=0)[1] == "no device: NVML lists none"
    assert told(nvml_library, tmp_path / "control", None, init=9)[1].startswith("no driver: its kernel module")
    assert told(nvml_library, tmp_path / "control", None, init=18)[1].startswith("driver mismatch: ")
