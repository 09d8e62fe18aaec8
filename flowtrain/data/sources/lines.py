"""JSON rows by byte offset: one object a line, or the elements of one array.

The file is walked once for the places of its rows; a row is parsed when it is asked for, so types may differ from row
to row and a broken row is a bad row, not a broken file. An array is recognised by its first character, whatever the
file is called; it has to be sound as a whole, because the end of a broken element cannot be known.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain.data.errors import BadRow
from flowtrain.data.sources.base import RawRow, file_fingerprint
from flowtrain.data.sources.row import parse_row
from flowtrain.errors import DataError

_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


class JsonSource:
    """Rows of a `.jsonl` or `.json` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fingerprint = file_fingerprint(path)
        self._starts = array("Q")
        self._ends = array("Q")
        self._lines = array("Q")
        places = _array_places(path) if _first_character(path) == "[" else _line_places(path)
        for start, end, line in places:
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> RawRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end, line = self._starts[index], self._ends[index], self._lines[index]
        where = f"{self.path}:{line}"
        stored = os.pread(self._fd, end - start, start)
        try:
            value = json.loads(stored.decode(), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise BadRow("bad-messages", f"{where} is not UTF-8 at byte {error.start + 1} of the line") from error
        except json.JSONDecodeError as error:
            place = f"{self.path}:{line + error.lineno - 1}:{error.colno}"
            raise BadRow(
                "bad-messages", f"{place} is not JSON ({error.msg}): expected one row a line, or one array of rows"
            ) from error
        except RecursionError as error:
            raise BadRow("bad-messages", f"{where} is nested too deeply") from error
        except _RepeatedKeyError as error:
            raise BadRow("bad-messages", f"{where} has the key {error.key!r} twice in one object") from error
        return parse_row(value, index, where, self.path.parent)


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A repeated key means that one of its values would be lost without a word."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKeyError(key)
        result[key] = value
    return result


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM).lstrip()
    return chr(head[0]) if head else ""


def _line_places(path: Path) -> Iterator[tuple[int, int, int]]:
    """(first byte, end, line number from 1) of each line that is not blank."""
    place = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[skip:].strip():
                yield place + skip, place + len(line), number
            place += len(line)


def _array_places(path: Path) -> Iterator[tuple[int, int, int]]:
    """The same for each element of an array that is the whole file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
    skip = len(_BOM) if _has_bom(path) else 0
    decoder = json.JSONDecoder()
    place = _past_space(text, 0)
    done, done_bytes, line = 0, skip, 1
    place = _past_space(text, place + 1)
    if text[place : place + 1] == "]":
        return
    while True:
        try:
            _, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno}:{error.colno} is not JSON ({error.msg}): expected one array of "
                "rows, or one row a line"
            ) from error
        start_bytes = done_bytes + len(text[done:place].encode())
        end_bytes = start_bytes + len(text[place:end].encode())
        line += text.count("\n", done, place)
        yield start_bytes, end_bytes, line
        line += text.count("\n", place, end)
        done, done_bytes = end, end_bytes
        place = _past_space(text, end)
        separator = text[place : place + 1]
        if separator == "]":
            return
        if separator != ",":
            raise DataError(f"{path}:{line + text.count(chr(10), end, place)} has no comma or bracket after a row")
        place = _past_space(text, place + 1)


def _has_bom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_BOM)) == _BOM


def _past_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
