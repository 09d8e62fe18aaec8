"""Writes docs/observables.md's table of metrics from the registry: `python scripts/metrics_reference.py`.

The page's text is kept; what stands between the two marker lines is made anew. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Metric

PAGE = Path(__file__).resolve().parent.parent / "docs/observables.md"
BEGIN = "<!-- made by scripts/metrics_reference.py: begin -->"
END = "<!-- end -->"


def row_of(metric: Metric) -> str:
    how = (metric.ranks.value if metric.ranks else "", metric.steps.value if metric.steps else "")
    cells = (f"`{metric.name}`", metric.kind.value, metric.unit, *how, metric.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_with_reference(page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END, 1)[1]
    rows = ["| name | kind | unit | ranks | run | meaning |", "|---|---|---|---|---|---|", *map(row_of, METRICS)]
    return f"{before}{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(page_with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
