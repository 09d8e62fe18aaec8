"""Several files as one source: the files of a folder, in the order of their names."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flowtrain.data.errors import BadRow
from flowtrain.data.sources.base import RawRow, Source


class FolderSource:
    """Rows of `parts`, one after another. Rows without an id of their own are numbered over all files."""

    def __init__(self, path: Path, parts: Sequence[Source]) -> None:
        assert parts, path
        self.path = path
        self.fingerprint = hashlib.blake2b(
            ",".join(part.fingerprint for part in parts).encode(), digest_size=8
        ).hexdigest()
        self._parts = tuple(parts)
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> RawRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        local = index - self._starts[number]
        try:
            row = self._parts[number].row(local)
        except BadRow as error:
            error.row_id = _renumbered(error.row_id, local, index)
            raise
        return replace(row, index=index, id=_renumbered(row.id, local, index) or row.id)


def _renumbered(row_id: str | None, local: int, index: int) -> str | None:
    return f"row-{index}" if row_id == f"row-{local}" else row_id
