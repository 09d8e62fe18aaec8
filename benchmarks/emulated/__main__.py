"""Emulated devices: the real runtime, with the compute of both modules replaced by waits.

    python -m benchmarks.emulated --json FILE [--check] [--quick] [--parts grid,control] [--only TEXT]

| part | shows |
|---|---|
| `grid` | 7B and 72B, two traces, frozen and trainable: modes and ablations, measured and modelled |
| `control` | messages, bytes and time of the controller a step and a pack, over numbers of devices |
| `drift` | `allocation.replan: auto` when images come half way |
| `faults` | kill -9 of devices at random moments, and going on |
| `steady` | 200 steps: memory, descriptors, segments |

Rows are written to `FILE.parts` as they are measured: the same command goes on where it was ended, `--fresh` begins
anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.emulated import control, drift, faults, grid, steady
from benchmarks.emulated.cases import DEVICE, Bench, cases, jitter
from benchmarks.record import Check, Result, main, table
from flowtrain.emulate.case import BYTE_SCALE
from flowtrain.emulate.executor import EmulatedExecutor, own_cluster

PARTS = ("grid", "control", "drift", "faults", "steady")
PLAIN = "7b sft_8k frozen"
"""The case of the other parts, and of `--quick`."""
QUICK_NAMES = ("flow", "disaggregated", "monolithic")
ROUNDS = 20

Rows = list[dict[str, Any]]


class Kept:
    """Rows on disk, by name; a file each."""

    def __init__(self, folder: Path | None, fresh: bool) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("*.json") if fresh else ():
                file.unlink()

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The one that is there, else what is measured now."""
        file = None if self.folder is None else self.folder / f"{name.replace(' ', '-')}.json"
        if file is not None and file.is_file():
            kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return kept
        row = {"part": name.split(" ")[0], **measure()}
        if file is not None:
            file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        print(name, {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        return row


def measure(options: argparse.Namespace) -> Result:
    kept = Kept(options.json.with_suffix(".parts") if options.json else None, options.fresh)
    parts = ["grid"] if options.quick else [part for part in PARTS if part in options.parts.split(",")]
    spread = jitter()
    with tempfile.TemporaryDirectory(prefix="flowtrain-emulated-") as folder:
        benches = {
            n: Bench(case, Path(folder, n.replace(" ", "-")), spread, options.seed) for n, case in cases().items()
        }
        rows: Rows = []
        checks: list[Check] = []
        if "faults" in parts:  # runs of their own, before this process joins a Ray node
            _add(rows, checks, _faults(benches[PLAIN], kept, options), faults.checks)
        if set(parts) - {"faults"}:
            with own_cluster() as cluster:
                executor = EmulatedExecutor(cluster, options.processes)
                try:
                    for part in parts:
                        if part != "faults":
                            measured = MEASURES[part](benches, executor, kept, options)
                            _add(rows, checks, measured, CHECKS[part])
                finally:
                    executor.close()
    settings = {
        "device": DEVICE,
        "jitter": spread,
        "byte scale": BYTE_SCALE,
        "processes": f"at most {options.processes} of either side, one of readers, none of which imports torch",
        "parts": parts,
    }
    for part in dict.fromkeys(row["part"] for row in rows):
        print(f"\n{part}\n\n{table(_even([row for row in rows if row['part'] == part]))}")
    print("\ngains, measured (and by the model)\n\n" + table(grid.gains(rows) or [{"case": "–"}]), flush=True)
    lines = [{name: row[name] for name in ("part", "case", "variant")} for row in rows]
    return Result({**settings, "measured": rows}, lines, checks)


def _add(rows: Rows, checks: list[Check], measured: Rows, of: Callable[[Rows], list[Check]]) -> None:
    rows += measured
    checks += of(measured)


def _even(rows: Rows) -> Rows:
    """With the same columns."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("part", "line", "steps s"))
    return [{name: row.get(name, "–") for name in names} for row in rows]


def _grid(benches: dict[str, Bench], executor: EmulatedExecutor, kept: Kept, options: argparse.Namespace) -> Rows:
    wanted: Sequence[str] = QUICK_NAMES if options.quick else options.variants.split(",")
    names = [PLAIN] if options.quick else [name for name in benches if options.only in name]
    return [
        kept.row(f"grid {run.case} {run.name}", partial(run.measure, benches[run.case], executor))
        for run in grid.runs(names, wanted)
    ]


def _control(benches: dict[str, Bench], executor: EmulatedExecutor, kept: Kept, options: argparse.Namespace) -> Rows:
    return [
        kept.row(f"control {nodes}", partial(control.measure, benches[PLAIN], executor, nodes))
        for nodes in control.NODES
    ]


def _drift(benches: dict[str, Bench], executor: EmulatedExecutor, kept: Kept, options: argparse.Namespace) -> Rows:
    return [kept.row("drift", partial(drift.measure, benches[PLAIN], executor))]


def _steady(benches: dict[str, Bench], executor: EmulatedExecutor, kept: Kept, options: argparse.Namespace) -> Rows:
    return [kept.row("steady", partial(steady.measure, benches[PLAIN], executor))]


def _faults(bench: Bench, kept: Kept, options: argparse.Namespace) -> Rows:
    return [kept.row(f"faults {number}", partial(faults.round_of, bench, number)) for number in range(options.rounds)]


MEASURES = {"grid": _grid, "control": _control, "drift": _drift, "steady": _steady}
CHECKS: dict[str, Callable[[Rows], list[Check]]] = {
    "grid": grid.checks,
    "control": control.checks,
    "drift": drift.checks,
    "steady": steady.checks,
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--parts", default=",".join(PARTS), help="which parts, by comma")
    found.add_argument("--only", default="", help="cases of the grid whose name has this in it")
    found.add_argument("--variants", default=",".join(grid.NAMES), help="of the grid, by comma")
    found.add_argument("--rounds", type=int, default=ROUNDS, help="of faults")
    found.add_argument("--quick", action="store_true", help="one case and three modes, in two minutes")
    found.add_argument("--fresh", action="store_true", help="measure all rows again")
    found.add_argument("--processes", type=int, default=4, help="most processes of either side")
    return found


if __name__ == "__main__":
    main("emulated", measure, parser())
