"""A small library in the place of NVIDIA's, loaded the way nvidia-ml-py loads that one, and what it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: Path) -> None:
    """Puts the library into the folder; skips the test where there is no compiler."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no C compiler (gcc)")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)


def environment(folder: Path, control: Path) -> dict[str, str]:
    """Of a process that is to load the library of `folder` and be answered what `control` says.

    There are GPUs to look at, and none to plan for, since torch has none.
    """
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(control), "CUDA_VISIBLE_DEVICES": ""}


def answer(control: Path, **answers: int) -> None:
    """What the library answers from now on: `fake_nvml.c` lists the keys, `fail_power` for `fail.power`."""
    aside = control.with_suffix(".new")
    aside.write_text("".join(f"{key.replace('_', '.')} {value}\n" for key, value in answers.items()))
    aside.replace(control)
