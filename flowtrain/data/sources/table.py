"""Parquet rows by row group, with the row groups used last kept in bounded memory.

A shuffled order visits row groups at random: when a file's row groups do not fit into `CACHE_BYTES` together, most rows
cost the decoding of a whole row group, so write files with row groups of a few hundred rows. `large_string`,
`large_binary` and `large_list` columns read like their small kin, and a column that only some files of a folder have is
missing in the others, whatever type an all-null column claims.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowtrain.data.sources.base import RawRow, file_fingerprint
from flowtrain.data.sources.row import COLUMNS, parse_row
from flowtrain.errors import DataError

CACHE_BYTES = 256 * 2**20


class GroupCache:
    """Decoded row groups, least recently used dropped first; the newest always stays, however large."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._tables: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()

    def get(self, key: tuple[Path, int]) -> pa.Table | None:
        table = self._tables.get(key)
        if table is not None:
            self._tables.move_to_end(key)
        return table

    def put(self, key: tuple[Path, int], table: pa.Table) -> None:
        self._tables[key] = table
        self.used_bytes += table.nbytes
        while self.used_bytes > self.max_bytes and len(self._tables) > 1:
            _, dropped = self._tables.popitem(last=False)
            self.used_bytes -= dropped.nbytes


class ParquetSource:
    """Rows of one `.parquet` file. Files of one folder share a cache."""

    def __init__(self, path: Path, cache: GroupCache | None = None) -> None:
        self.path = path
        self.fingerprint = file_fingerprint(path)
        self._cache = cache or GroupCache()
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a parquet file that can be read: {error}") from error
        names = self._file.schema_arrow.names
        self._columns = [name for name in COLUMNS if name in names]
        if not {"messages", "conversations"} & set(self._columns):
            raise DataError(f"{path} has no column `messages` or `conversations`; it has {', '.join(names)}")
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> RawRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect_right(self._starts, index) - 1
        stored = self._group(group).slice(index - self._starts[group], 1).to_pylist()[0]
        return parse_row(stored, index, f"{self.path} row {index}", self.path.parent)

    def _group(self, group: int) -> pa.Table:
        key = (self.path, group)
        table = self._cache.get(key)
        if table is None:
            try:
                table = self._file.read_row_group(group, columns=self._columns, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"row group {group} of {self.path} cannot be read: {error}") from error
            self._cache.put(key, table)
        return table
