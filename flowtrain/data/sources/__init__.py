"""Data files as numbered rows: parquet, JSON lines, JSON arrays, and folders of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowtrain.data.sources.base import ImageRef, RawRow, Source
from flowtrain.data.sources.folder import FolderSource
from flowtrain.data.sources.lines import JsonSource
from flowtrain.errors import DataError
from flowtrain.sizes import SIZES_SUFFIX

__all__ = ["FORMATS", "ImageRef", "RawRow", "Source", "open_source"]


def _open_parquet(paths: list[Path]) -> list[Source]:
    from flowtrain.data.sources.table import GroupCache, ParquetSource

    cache = GroupCache()
    return [ParquetSource(path, cache) for path in paths]


def _open_json(paths: list[Path]) -> list[Source]:
    return [JsonSource(path) for path in paths]


FORMATS: dict[str, Callable[[list[Path]], list[Source]]] = {
    ".parquet": _open_parquet,
    ".jsonl": _open_json,
    ".json": _open_json,
}


def open_source(path: Path) -> Source:
    """The rows at `path`; DataError when there is no such file or it is of a kind that is not read."""
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise DataError(f"{path} does not exist: set data.train or data.eval to a file or folder of rows")
        return _opener(path)([path])[0]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_folder(path: Path) -> Source:
    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix in FORMATS and not file.name.startswith(".") and not file.name.endswith(SIZES_SUFFIX)
    )
    kinds = sorted({file.suffix for file in files})
    if not files:
        raise DataError(f"{path} holds no {', '.join(FORMATS)} file")
    if len(kinds) > 1:
        raise DataError(f"{path} holds {' and '.join(kinds)} files: keep the rows of a run in files of one kind")
    return FolderSource(path, FORMATS[kinds[0]](files))


def _opener(path: Path) -> Callable[[list[Path]], list[Source]]:
    if path.suffix not in FORMATS:
        raise DataError(f"{path} is not a kind of file that is read: rows come from {', '.join(FORMATS)} files")
    return FORMATS[path.suffix]
