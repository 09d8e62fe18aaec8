"""The form of a benchmark's result: what ran, where, with which settings, and whether its limits were kept.

    main("packing", measure) ──▶ measure(options) ──▶ Result(settings, rows, checks) ──▶ table, --json FILE, exit code

A check is `{name, value, op, limit, ok}`; with `--check` the exit code is 1 when one is not ok.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
PACKAGES = ("flowtrain", "torch", "transformers", "ray", "numpy")


@dataclass(frozen=True, slots=True)
class Check:
    """A limit on one figure."""

    name: str
    value: float
    op: str
    limit: float

    @property
    def ok(self) -> bool:
        return OPERATORS[self.op](self.value, self.limit)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "op": self.op, "limit": self.limit, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark measured: its settings, one mapping a row, its checks."""

    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Check]


def environment() -> dict[str, Any]:
    """Commit, hardware and versions."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=20, check=False
    )
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return {
        "commit": commit.stdout.strip() or "unknown",
        "hardware": {
            "machine": platform.machine(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def processor_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table, for a terminal and for the docs; none make an empty one."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(
    name: str, measure: Callable[[argparse.Namespace], Result], parser: argparse.ArgumentParser | None = None
) -> None:
    """Parse the command line, measure, write the record, leave with the exit code of the checks.

    `parser` has the benchmark's own options; those that all have are added to it. `measure` gets what was given.
    """
    parser = parser or argparse.ArgumentParser()
    parser.prog = f"python -m benchmarks.{name}"
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is not kept")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = measure(options)
    checks = [check.to_dict() for check in result.checks]
    print(table(result.rows), table(checks), sep="\n\n")
    if options.json:
        record = {
            "benchmark": name,
            **environment(),
            "settings": dict(result.settings),
            "seed": options.seed,
            "rows": [dict(row) for row in result.rows],
            "checks": checks,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if options.check and not all(check.ok for check in result.checks):
        failed = ", ".join(check.name for check in result.checks if not check.ok)
        sys.exit(f"benchmark {name}: limits not kept: {failed}")
