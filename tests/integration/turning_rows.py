"""Rows whose data turn half way: first mostly text, then mostly pictures, or the other way round."""

from __future__ import annotations

import json
from pathlib import Path

from integration_runs import EXAMPLES


def turning_rows(path: Path, num_before: int, num_after: int, pictures_first: bool = False) -> Path:
    """Emoji rows in this order: without images (one in eight has one), then with at least two images each."""
    source = EXAMPLES / "emoji" / "data" / "train.jsonl"
    text, single, several = [], [], []
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        images = row.get("images") or []
        row["images"] = [str(source.parent / image) for image in images]
        (several if len(images) >= 2 else single if images else text).append(json.dumps(row))
    calm = [single.pop() if n % 8 == 0 else text.pop() for n in range(num_before)]
    busy = [several.pop() for _ in range(num_after)]
    rows = [*busy, *calm] if pictures_first else [*calm, *busy]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
