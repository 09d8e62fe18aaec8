"""Whether a run is alive: RUN_DIR/flowtrain.lock names its launcher, and the machine on which it runs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import psutil

LOCK_FILE = "flowtrain.lock"


def this_holder() -> dict[str, Any]:
    """What the lock file of a run says of its launcher, for this process."""
    me = psutil.Process()
    return {"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}


def read_holder(file: Path) -> Any:
    """What a lock file says; None where it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def other_host(holder: Any) -> str | None:
    """The machine of a launcher that is not on this one, where whether it is alive cannot be seen."""
    host = holder.get("host") if isinstance(holder, dict) else None
    return host if isinstance(host, str) and host != socket.gethostname() else None


def live_process(holder: Any) -> int | None:
    """The launcher that the content of a lock file names, if it is alive on this machine."""
    if other_host(holder) is not None:
        return None
    try:
        process = psutil.Process(holder["pid"])
        alive = abs(process.create_time() - holder["started"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return None
    return process.pid if alive else None
