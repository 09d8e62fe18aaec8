"""How a run stands, by the small files of its folder: phase, error line, plan, rows skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from flowtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from flowtrain.telemetry.dashboard.foreign import mapping, number, sequence, single, text
from flowtrain.telemetry.fatal import ERROR_FILE
from flowtrain.telemetry.run_files import SUMMARY_FILE
from flowtrain.telemetry.running import LOCK_FILE, live_holder

MOST_BYTES = 8 << 20
STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)


class SmallFiles:
    """Parsed files of a folder, read again only when they have changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, tuple[tuple[int, int, int], Any]] = {}

    def read(self, name: str) -> Any:
        """Content of a JSON or YAML file; None when absent, torn, too large, or leading out of the folder."""
        path = self._root / name
        try:
            if not path.resolve().is_relative_to(self._root):
                return None
            status = path.stat()
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if name not in self._known or self._known[name][0] != stamp:
                self._known[name] = stamp, None  # what cannot be parsed is not tried again
                parse: Callable[[str], Any] = json.loads if path.suffix == ".json" else yaml.safe_load
                content = path.read_text(encoding="utf-8") if status.st_size <= MOST_BYTES else "null"
                self._known[name] = stamp, parse(content)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return None
        return self._known[name][1]

    def changed_at(self, name: str) -> float:
        """Seconds since the epoch; 0 when absent."""
        try:
            return (self._root / name).stat().st_mtime
        except OSError:
            return 0.0


def phase_of(root: Path, files: SmallFiles, num_steps: int) -> dict[str, Any]:
    """`phase`: starting, running, done, stopped, failed or lost, with `exit_code` and `line` where they are known."""
    started = mapping(files.read(LOCK_FILE)).get("started", 0.0)
    ended = files.changed_at(SUMMARY_FILE) if isinstance(started, float | int) else 0.0
    if live_holder(root / LOCK_FILE) is not None and ended <= started:
        return {"phase": "running" if num_steps else "starting", "exit_code": None, "line": None}
    error = mapping(files.read(ERROR_FILE))
    code, line = error.get("exit_code"), error.get("line")
    if code is None:
        code = mapping(files.read(SUMMARY_FILE)).get("exit")
    if not isinstance(code, int):
        told = "The run left no word of its end: it was killed, or runs on another machine."
        return {"phase": "lost", "exit_code": None, "line": told}
    phase = "done" if code == 0 else "stopped" if code in STOPPED else "failed"
    return {"phase": phase, "exit_code": code, "line": text(line) if line and code else None}


def total_steps(config: dict[str, Any], composition: dict[str, Any]) -> int | None:
    """What the run aims at; by epochs it is known once composition has told how many rows there are."""
    train = mapping(config.get("train"))
    if isinstance(train.get("max_steps"), int):
        return int(number(train["max_steps"]))
    rows, samples, epochs = composition.get("num_rows"), composition.get("step_samples"), train.get("epochs")
    if isinstance(rows, int) and isinstance(samples, int) and samples > 0 and isinstance(epochs, int):
        return int(max(1, number(rows) * number(epochs) // samples))
    return None


def plan_of(plan: dict[str, Any], placed: Any) -> dict[str, Any]:
    """The plan's sides and who runs where: `{placement, cpus, pool_bytes, sides: […], nodes: […]}`."""
    sides, nodes = [], dict[str, list[str]]()
    for side in ("producers", "consumers"):
        about = mapping(plan.get(side))
        ranks = [mapping(rank) for rank in sequence(about.get("ranks"))]
        for rank in ranks:
            nodes.setdefault(text(rank.get("node", 0)), [])
        sides.append(
            {
                "role": side,
                "layout": text(about.get("layout")),
                "ranks": len(ranks),
                "devices": sorted({text(rank.get("device")) for rank in ranks}),
                "threads": sorted({text(rank.get("threads")) for rank in ranks}),
                "nodes": sorted({text(rank.get("node", 0)) for rank in ranks}),
            }
        )
        for node in nodes:
            here = [index for index, rank in enumerate(ranks) if text(rank.get("node", 0)) == node]
            if here:
                nodes[node].append(f"{side[:-1]} {_ranges(here)}")
    if isinstance(placed, list) and placed:
        nodes = {}
        for row in map(mapping, placed):
            where, address = text(row.get("node", "?")), text(row.get("address"))
            where = f"{where} ({address})" if address else where
            nodes.setdefault(where, []).append(f"{text(row.get('role', '?'))} {text(row.get('ranks'))}".strip())
    return {
        "placement": single(plan.get("placement")),
        "cpus": single(plan.get("cpus")),
        "readers": single(plan.get("readers")),
        "pool_bytes": single(plan.get("pool_bytes")),
        "sides": sides if plan else [],
        "nodes": [{"node": node, "who": who} for node, who in nodes.items()],
    }


def _ranges(numbers: list[int]) -> str:
    """`0-3, 6` of ascending numbers."""
    parts: list[list[int]] = []
    for one in numbers:
        if parts and one == parts[-1][-1] + 1:
            parts[-1][1:] = [one]
        else:
            parts.append([one])
    return ", ".join("-".join(map(str, part)) for part in parts)
