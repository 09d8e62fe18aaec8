"""What a process is doing right now, kept where it outlives the process: a C++ abort leaves no Python traceback (C9).

    with spans("train"):               file: "train"
        with spans("collective"):      file: "train > collective"
                                       file: "train"
                                       file: ""

The file is 256 mapped bytes: entering a span is a memory write, no system call, no sync, and the kernel keeps the page
however the process dies. Layout: 2 bytes length (little endian), then UTF-8. The length is zeroed while the text
changes, so that a reader never sees half of each.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain.telemetry.trace import TraceFile

SPAN_BYTES = 256
_LENGTH = struct.Struct("<H")
_MAX_TEXT = SPAN_BYTES - _LENGTH.size


class Spans:
    """The open spans of one process; call it with a name for a context manager. One thread only.

    `trace`: also record every finished span there, as one line of a Chrome timeline.
    """

    def __init__(self, path: Path, trace: TraceFile | None = None) -> None:
        self.path = path
        self._open: list[str] = []
        self._trace = trace
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(SPAN_BYTES)
            self._page = mmap.mmap(file.fileno(), SPAN_BYTES)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Keep `name` in the file while the block runs; spans nest."""
        self._open.append(name)
        self._write()
        start = time.time()
        try:
            yield
        finally:
            self._open.pop()
            self._write()
            if self._trace is not None:
                self._trace.span(name, start, time.time() - start)

    def close(self) -> None:
        """Give the mapping back; the file stays. Idempotent."""
        self._page.close()
        if self._trace is not None:
            self._trace.close()

    def _write(self) -> None:
        text = " > ".join(self._open).encode()[-_MAX_TEXT:]
        self._page[: _LENGTH.size] = _LENGTH.pack(0)
        self._page[_LENGTH.size : _LENGTH.size + len(text)] = text
        self._page[: _LENGTH.size] = _LENGTH.pack(len(text))


def read_last_span(path: Path) -> str | None:
    """The spans that were open, outermost first, such as `train > collective`; None when idle or never written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(content)
    text = content[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")
    return text or None
