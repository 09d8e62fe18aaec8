"""Who may import whom: the contracts of setup.cfg, and what a fresh interpreter really loads.

The static contracts do not see what an `__init__` pulls in or what a library drags along; a fresh interpreter does.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "ray", "transformers")
STARTUP_SECONDS = 0.6
"""Contract C14 and issue text: `flowtrain --help` on two cores."""

TORCH_FREE = (
    "flowtrain.errors",
    "flowtrain.types",
    "flowtrain.plan",
    "flowtrain.messages",
    "flowtrain.sizes",
    "flowtrain.config.schema",
    "flowtrain.config.loading",
    "flowtrain.shapes",
    "flowtrain.flops",
    "flowtrain.packing.compose",
    "flowtrain.packing.cost",
    "flowtrain.allocator",
    "flowtrain.update.clip",
    "flowtrain.update.schedule",
    "flowtrain.pool.address",
    "flowtrain.pool.arena",
    "flowtrain.pool.directory",
    "flowtrain.data.order",
    "flowtrain.data.stream",
    "flowtrain.runtime.flow",
    "flowtrain.telemetry.fatal",
    "flowtrain.telemetry.dashboard.serve",
    "flowtrain.telemetry.run_files",
    "flowtrain.telemetry.spans",
    "flowtrain.emulate.slot",
    "flowtrain.cli.main",
)


def fresh_interpreter(code: str, repository: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def newly_loaded(modules: tuple[str, ...], repository: Path) -> dict[str, list[str] | str]:
    """For each module, imported one after the other in one fresh interpreter: the heavy packages that came with it."""
    code = f"""
import importlib, json, sys
loaded = {{}}
for module in {modules!r}:
    before = set(sys.modules)
    try:
        importlib.import_module(module)
        loaded[module] = [name for name in {HEAVY!r} if name in sys.modules and name not in before]
    except ImportError as error:
        loaded[module] = str(error)
print(json.dumps(loaded))
"""
    loaded: dict[str, list[str] | str] = json.loads(fresh_interpreter(code, repository))
    return loaded


def test_contracts_of_setup_cfg_hold(repository: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_nothing_heavy(module: str, repository: Path) -> None:
    assert newly_loaded(TORCH_FREE, repository)[module] == []


def test_the_check_sees_torch(repository: Path) -> None:
    assert (
        "torch" in newly_loaded(("flowtrain.types", "flowtrain.update.updater"), repository)["flowtrain.update.updater"]
    )


def test_only_the_runtime_loads_ray(repository: Path) -> None:
    parts = "flowtrain.producer.stage, flowtrain.consumer.stage, flowtrain.pool.client, flowtrain.data.reader"
    code = f"import {parts}, flowtrain.models.backbone, flowtrain.update.updater, sys; print('ray' in sys.modules)"
    assert fresh_interpreter(code, repository).strip() == "False"


def test_no_process_of_an_emulated_run_loads_torch(repository: Path) -> None:
    code = "import flowtrain.emulate.driver, flowtrain.emulate.executor, sys; print('torch' in sys.modules)"
    assert fresh_interpreter(code, repository).strip() == "False"


def test_help_is_quick_and_light(repository: Path) -> None:
    """Processor time of the lightest of three runs: other processes on the machine may only add to it."""
    code = "import sys; sys.argv = ['flowtrain', '--help']; from flowtrain.cli.main import main; main()"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert "launch" in done.stdout
    assert min(seconds) < STARTUP_SECONDS
