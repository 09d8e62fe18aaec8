"""How a run stands, by the small files of its folder: phase, error line, plan, rows skipped; which cannot be read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from flowtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from flowtrain.telemetry.dashboard.foreign import UnreadableError, mapping, number, opened, sequence, single, text
from flowtrain.telemetry.fatal import ERROR_FILE
from flowtrain.telemetry.run_files import METRICS_FILE, SUMMARY_FILE
from flowtrain.telemetry.running import LOCK_FILE, live_process, other_host

MOST_BYTES = 8 << 20
ELSEWHERE_SECONDS = 300.0
"""A run on another machine that has written no record for so long may be gone."""

STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)


class SmallFiles:
    """Parsed files of a folder, read again only when they have changed.

    Attributes:
        problems: name of a file that is there and cannot be read ▶ why.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, tuple[tuple[int, int, int], Any]] = {}
        self.problems: dict[str, str] = {}

    def read(self, name: str) -> Any:
        """Content of a JSON or YAML file; None when absent, empty, or not to be read."""
        path = self._root / name
        try:
            with opened(path, self._root) as file:
                status = os.fstat(file.fileno())
                stamp = status.st_ino, status.st_mtime_ns, status.st_size
                if name not in self._known or self._known[name][0] != stamp:
                    self._known[name] = stamp, None  # what cannot be parsed is not tried again
                    self.problems.pop(name, None)
                    if status.st_size > MOST_BYTES:
                        raise UnreadableError(f"it is larger than {MOST_BYTES >> 20} MiB")
                    parse: Callable[[str], Any] = json.loads if path.suffix in (".json", ".lock") else yaml.safe_load
                    content = file.read(MOST_BYTES).decode()
                    self._known[name] = stamp, parse(content) if content.strip() else None
        except FileNotFoundError:
            self._known.pop(name, None)
            self.problems.pop(name, None)
            return None
        except UnreadableError as error:
            self.problems[name] = str(error)
            return None
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            self.problems[name] = _fault(error, "JSON" if path.suffix in (".json", ".lock") else "YAML")
            return None
        return self._known[name][1]

    def changed_at(self, name: str) -> float:
        """Seconds since the epoch; 0 when absent."""
        try:
            return (self._root / name).stat().st_mtime
        except OSError:
            return 0.0


def _fault(error: Exception, kind: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    line = getattr(error, "lineno", None)
    if line is None and (mark := getattr(error, "problem_mark", None)) is not None:
        line = mark.line + 1
    return f"it is no {kind}" + (f" (line {line})" if line else "")


def phase_of(files: SmallFiles, num_steps: int) -> dict[str, Any]:
    """`phase`: starting, running, done, stopped, failed or lost, with `exit_code` and `line` where they are known."""
    holder = mapping(files.read(LOCK_FILE))
    started = number(holder.get("started"))
    going_on = {"phase": "running" if num_steps else "starting", "exit_code": None, "line": None}
    ended = files.changed_at(SUMMARY_FILE)
    if ended <= started and live_process(holder) is not None:
        return going_on
    error = mapping(files.read(ERROR_FILE))
    if (host := other_host(holder)) is not None and ended <= started and not error:
        written = max(started, files.changed_at(METRICS_FILE))
        if time.time() - written < ELSEWHERE_SECONDS:
            return going_on
        told = f"The run on {host[:80]} has written nothing for {ELSEWHERE_SECONDS:g} s: it is slow, or was killed."
        return {"phase": "lost", "exit_code": None, "line": told}
    code, line = error.get("exit_code"), error.get("line")
    if code is None:
        code = mapping(files.read(SUMMARY_FILE)).get("exit")
    if not isinstance(code, int):
        told = "The run left no word of its end: it was killed."
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
