"""Limits on wall-clock time, for machines that have other things to do."""

from __future__ import annotations

import os
from pathlib import Path


def allowed(seconds: float) -> float:
    """`seconds` where every thread that wants a core has one; in proportion longer while they have to share."""
    last_minute, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(last_minute), float(now.partition("/")[0]))
    return seconds * max(1.0, wanted / len(os.sched_getaffinity(0)))
