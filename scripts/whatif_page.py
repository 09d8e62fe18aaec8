"""Writes the tables of docs/what-if.md from the record of `python -m benchmarks.whatif --json FILE`.

    python scripts/whatif_page.py FILE

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`; one that the record does not have stays as it is.
The text around them is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs/what-if.md"
COLUMNS = ("case", "devices", "layouts", "samples/s", "tokens/s a device", "MFU %", "step s", "starved %", "stalled %")
MORE = {
    "paper": ("beside",),
    "scaling": ("controller %", "answers a step", "beside"),
    "checkpoints": ("lost %", "beside"),
}
LEFT_OUT = {"checkpoints": ("devices", "layouts", "starved %", "stalled %", "tokens/s a device", "MFU %")}


def table(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a page as Markdown."""
    columns = [name for name in (*COLUMNS, *MORE.get(page, ())) if name not in LEFT_OUT.get(page, ())]
    cells = [[_text(row[name]) for name in columns] for row in rows if row["page"] == page]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def main(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))

    pages = {row["page"] for row in record["rows"]}

    def fill(match: re.Match[str]) -> str:
        if match[1] not in pages:
            return match[0]
        return f"<!-- table: {match[1]} -->\n{table(match[1], record['rows'])}\n<!-- end -->"

    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
