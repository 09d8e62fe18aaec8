"""Files of a run, which may be and hold anything (torn, edited, hostile, not to be read), as what the page can hold."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 2**53
"""Beyond it a number of the page is no longer exact, and the sums here need not fear overflow."""


class UnreadableError(Exception):
    """Why a file cannot be read, as the end of "FILE cannot be read: …"."""


@contextmanager
def opened(path: Path, root: Path) -> Iterator[BinaryIO]:
    """A file inside `root`, to read; never waits for somebody to write, as opening a pipe would.

    Raises:
        FileNotFoundError: it is not there.
        UnreadableError: it is there and cannot be read.
    """
    try:
        if not path.resolve().is_relative_to(root):
            raise UnreadableError("it is a link that leads out of the run's folder")
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableError("it is no regular file")
            yield file
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # the latter by links in a circle
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from error


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


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
