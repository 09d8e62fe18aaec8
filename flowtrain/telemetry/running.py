"""Whether a run is alive: RUN_DIR/flowtrain.lock names its launcher."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

LOCK_FILE = "flowtrain.lock"


def live_holder(file: Path) -> int | None:
    """The launcher that wrote the lock file, if it is alive on this machine."""
    try:
        content = json.loads(file.read_text())
        process = psutil.Process(content["pid"])
        alive = abs(process.create_time() - content["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, psutil.Error):
        return None
    return process.pid if alive else None
