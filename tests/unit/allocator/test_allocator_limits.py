"""Limits of the operating system: found before the start, with both numbers and what to change."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from flowtrain.allocator.limits import ProcessLimits, limit_warnings, needed_files, process_limits, raise_open_files
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan
from flowtrain.types import Role

ENOUGH = ProcessLimits(4096, 4096, -1)


def plan(num: int = 2, device: str = "cpu") -> Plan:
    sides = [
        ModulePlan(
            role, Layout(dp_replicate=num), tuple(RankPlan(role, rank, device, 1, 1 << 20) for rank in range(num))
        )
        for role in (Role.PRODUCER, Role.CONSUMER)
    ]
    return Plan("disaggregated", *sides, readers=1, cpus=4, pool_bytes=num << 20)


def test_files_grow_with_processes_only() -> None:
    assert needed_files(plan(4)) - needed_files(plan(2)) == 2 * (needed_files(plan(2)) - needed_files(plan(1)))
    raise_open_files(plan(), ENOUGH)


def test_too_few_files_are_refused_with_both_numbers() -> None:
    needed = needed_files(plan())
    with pytest.raises(PlanError, match=f"may have {needed} files open .* the limit is {needed - 1}: raise it"):
        raise_open_files(plan(), ProcessLimits(64, needed - 1, -1))


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    code = (
        "import resource, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_allocator_limits import plan\n"
        "from flowtrain.allocator.limits import needed_files, process_limits, raise_open_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "raise_open_files(plan(), process_limits())\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (needed_files(plan()), hard)\n"
    )
    folder = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=60)


def test_a_low_limit_of_locked_memory_is_one_warning_with_both_numbers() -> None:
    low = replace(ENOUGH, locked_bytes=65536)
    assert limit_warnings(plan(), low) == []
    assert limit_warnings(plan(device="cuda:0"), ENOUGH) == []
    [line] = limit_warnings(plan(device="cuda:0"), low)
    assert "2097152 bytes of the pool" in line
    assert "limit is 65536 bytes" in line
    assert "ulimit -l" in line


def test_limits_are_those_of_the_process() -> None:
    assert process_limits().open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
