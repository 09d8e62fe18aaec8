"""Writing files so that a reader sees the old or the new content and nothing between."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write aside, sync, rename; raises `OSError` and leaves the old file when that fails.

    What a link leads to is replaced, not the link; a device or pipe (`/dev/stdout`, `/dev/null`) is written into.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        if not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
