"""Values from a run's files, which may hold anything (torn, edited, hostile), as what the page can hold."""

from __future__ import annotations

import json
import math
from typing import Any

LARGEST = 2**53
"""Beyond it a number of the page is no longer exact, and the sums here need not fear overflow."""


def parsed(text: str | bytes) -> Any:
    """JSON; None where it is none, or nested too deep to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def mapping(value: Any) -> dict[str, Any]:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: Any) -> Any:
    """`value` where it is an int or float between ±`LARGEST`, else 0."""
    return value if type(value) in (int, float) and -LARGEST <= value <= LARGEST else 0


def single(value: Any) -> str | int | float | bool | None:
    """`value` where it is a text, a finite number or a truth, else None: a few lines of YAML can be gigabytes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) else None


def text(value: Any) -> str:
    """The same as text; empty where there is nothing to show."""
    shown = single(value)
    return "" if shown is None else str(shown)
