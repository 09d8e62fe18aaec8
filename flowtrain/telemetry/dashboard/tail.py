"""New lines of a file that somebody else appends to, cuts or replaces."""

from __future__ import annotations

import os
from pathlib import Path

from flowtrain.telemetry.dashboard.foreign import UnreadableError, opened

CHUNK_BYTES = 1 << 20
"""Read at a time, so that whoever asks meanwhile need not wait long."""

MOST_LINE_BYTES = 64 << 20

MARK_BYTES = 128


class Tail:
    """Complete lines of one file inside `root`, from its beginning.

    A resumed run replaces metrics.jsonl by a shorter one, a new run by another: either is seen by the file's identity,
    its size, or by what stands before the place where reading goes on.

    Attributes:
        offset, size: bytes given so far; bytes of the file at the last `read`.
        at_end: whether all that was complete at the last `read` has been given.
        problem: why the last `read` could not read what is there; what was given before stays.
        passed_over: bytes of lines longer than any record.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self._identity: tuple[int, int] | None = None
        self._chunk = CHUNK_BYTES
        self._mark = b""
        self.offset = 0
        self.size = 0
        self.at_end = True
        self.problem: str | None = None
        self.passed_over = 0

    @property
    def torn_bytes(self) -> int:
        """Of the last line, where it has no end (yet)."""
        return self.size - self.offset if self.at_end and self._identity is not None else 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file began anew, and the complete lines that are new since, some `CHUNK_BYTES` at most."""
        try:
            with opened(self.path, self._root) as file:
                self.problem = None
                status = os.fstat(file.fileno())
                self.size = status.st_size
                anew = False
                if self._identity not in (None, (status.st_dev, status.st_ino)) or self.size < self.offset:
                    anew = self._forget()
                self._identity = status.st_dev, status.st_ino
                if self.size == self.offset:
                    self.at_end = True
                    return anew, []
                file.seek(self.offset - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    anew = self._forget()
                    file.seek(0)
                content = file.read(self._chunk)
        except FileNotFoundError:
            self.problem, self.size = None, 0
            return self._forget(), []
        except UnreadableError as error:
            self.problem, self.at_end = str(error), True
            return False, []
        return anew, self._lines(content)

    def _lines(self, content: bytes) -> list[bytes]:
        full = len(content) == self._chunk
        end = content.rfind(b"\n") + 1
        self.at_end = not full
        if full and not end and self._chunk < MOST_LINE_BYTES:
            self._chunk *= 2
            return []
        if full and not end:  # no record is as long: go over it rather than hold it
            self.offset, self._mark = self.offset + len(content), b""
            self.passed_over += len(content)
            return []
        self._chunk = CHUNK_BYTES
        self.offset += end
        self._mark = content[max(0, end - MARK_BYTES) : end] or self._mark
        return content[:end].splitlines()

    def _forget(self) -> bool:
        """Begin at the beginning; returns whether anything had been read."""
        had, self._identity = self.offset > 0, None
        self.offset, self._mark, self.at_end, self.passed_over = 0, b"", True, 0
        return had
