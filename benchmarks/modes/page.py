"""Tables of docs/performance.md, from the records in benchmarks/baselines: `python -m benchmarks.modes.page`.

What stands between the two marks of the page is replaced; a test compares it with the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.modes.make import JOBS
from benchmarks.modes.record import Record, by_other, checks, load_ratio, rates
from benchmarks.peers.settings import LEAST_RATIO
from benchmarks.record import Check, table
from flowtrain.cli.bench_result import RATE

ROOT = Path(__file__).resolve().parent.parent.parent
BASELINES = ROOT / "benchmarks/baselines"
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- made by benchmarks/modes/page.py: begin -->", "<!-- made by benchmarks/modes/page.py: end -->"
NUM_LOSSES = 3


def records() -> tuple[dict[str, Record], dict[str, Any]]:
    """Of the modes and of the peers, by job, as far as there are any."""
    of_modes, of_peers = {}, {}
    for job in JOBS:
        for found, name in ((of_modes, f"modes-{job}.json"), (of_peers, f"peers-{job}.json")):
            if (file := BASELINES / name).is_file():
                found[job] = json.loads(file.read_text(encoding="utf-8"))
    return of_modes, of_peers


def text() -> str:
    """Everything between the marks."""
    of_modes, of_peers = records()
    return "\n\n".join(part for job in JOBS for part in _job(job, of_modes.get(job), of_peers.get(job)))


def _job(job: str, modes: Record | None, peers: dict[str, Any] | None) -> Iterator[str]:
    if modes is None and peers is None:
        return
    yield f"### {job}"
    if modes is not None:
        yield _told(modes)
        yield _modes(modes)
        yield table([check.to_dict() for check in checks(modes)])
        yield _losses(modes)
    if peers is not None:
        yield _told(peers)
        yield _peers(peers)


def _told(record: Record) -> str:
    machine, versions, settings = record["hardware"], record["versions"], record["settings"]
    rounds = len(next(iter(record["runs"].values())))
    ratio = f"; load of producers by consumers {load_ratio(record):.3f}" if "loads" in record else ""
    how = f"{rounds} rounds of {settings['steps']} steps, the first {settings['warmup']} not measured"
    return (
        f"`python -m benchmarks.{record['benchmark']}`, commit {record['commit']}; {machine['processor']}, "
        f"{machine['cores']} cores; torch {versions['torch']}, transformers {versions['transformers']}, ray "
        f"{versions['ray']}; {how}{ratio}."
    )


def _modes(record: Record) -> str:
    ratios, schedules = by_other(record), record["schedule / measured"]
    bounds = {name: _bound_by(record, name) for name in ratios}
    rows = [
        {
            "": name,
            "samples/s": f"{rate.median:.2f}",
            "spread": f"{100 * rate.spread:.1f} %",
            "flow / it": f"{ratios[name].median:.3f}" if name in ratios else "",
            "split bound / it": f"{bounds[name]:.3f}" if name in ratios else "",
            "schedule / measured": f"{median(schedules[name]):.3f}" if name in schedules else "",
        }
        for name, rate in rates(record).items()
    ]
    for limit in record["limits"][0]:
        value = median([of_round[limit] for of_round in record["limits"]])
        flow = rates(record)["flow"].median
        rows.append({**dict.fromkeys(rows[0], ""), "": f"*{limit}*", "samples/s": f"{value:.2f}"})
        rows[-1]["flow / it"] = f"{flow / value:.3f}"
    return table(rows)


def _bound_by(record: Record, name: str) -> float:
    """The split bound by a variant, of the same round: the most that `flow` could be by it."""
    pairs = zip(record["limits"], record["runs"][name], strict=True)
    return median(limit["split bound"] / run[RATE] for limit, run in pairs)


def _losses(record: Record) -> str:
    """What a step of each mode has beside the modules' own work, the largest first."""
    lines = ["Largest losses of a step against the ideal, milliseconds a device (last round):", ""]
    for name, losses in record["losses"].items():
        told = "; ".join(f"{what} {1000 * seconds:.0f}" for what, seconds in list(losses.items())[:NUM_LOSSES])
        lines.append(f"* `{name}`: {told}")
    return "\n".join(lines)


def _peers(record: dict[str, Any]) -> str:
    rows = [{"": name, "samples/s": f"{rate:.2f}"} for name, rate in record["medians"].items()]
    best = Check(f"{record['best mode']} / {record['best peer']}", record["best mode / best peer"], ">=", LEAST_RATIO)
    shares = [record[f"mfu {of} (%)"] for of in ("of the best mode", "of the best peer", "that the limit takes")]
    told = "MFU {:.1f} % of the best mode, by the same FLOPs {:.1f} % of the best peer; the limit would take {:.1f} %."
    return f"{table(rows)}\n\n{table([best.to_dict()])}\n\n{told.format(*shares)}"


def filled(page: str) -> str:
    """The page with new tables."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
