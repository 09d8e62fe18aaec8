"""Makes docs/images/dashboard.png: `python scripts/dashboard_picture.py RUN_DIR` draws the page of a real run.

Needs Debian's chromium. The picture is reduced to 256 colours, so that it stays small.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.chromium import Chromium  # noqa: E402
from flowtrain.telemetry.dashboard.serve import serving  # noqa: E402

PICTURE = ROOT / "docs/images/dashboard.png"
WIDTH, HEIGHT = 1440, 1240
SETTLED_SECONDS = 1.0
"""For what cannot be asked of the page: that fonts and the last lump of every curve are drawn."""


def main(run_dir: Path) -> None:
    with serving([run_dir]) as address, Chromium(WIDTH, HEIGHT) as page:
        page.open(address)
        page.until("document.querySelectorAll('[data-chart] .plot canvas').length > 8", "the charts")
        time.sleep(SETTLED_SECONDS)
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(PICTURE)
    small = io.BytesIO()
    Image.open(PICTURE).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    PICTURE.write_bytes(small.getvalue())
    print(f"{PICTURE}: {len(small.getvalue()) / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
