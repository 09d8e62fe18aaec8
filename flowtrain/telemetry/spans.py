"""What a process is doing right now, kept where it outlives the process: a C++ abort leaves no Python traceback (C9).

    with spans.order("train"):         file: "train"
        with spans("forward"):         file: "train > forward"
                                       file: "train"
                                       file: ""

The file is 256 mapped bytes: entering a span is a memory write, no system call, no sync, and the kernel keeps the page
however the process dies. Layout: 2 bytes length (little endian), then UTF-8. The length is zeroed while the text
changes, so that a reader never sees half of each. With a `Trace` every finished span is recorded there as well.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from flowtrain.errors import PlanError
from flowtrain.telemetry.trace import Trace

SPAN_BYTES = 256
_LENGTH = struct.Struct("<H")
_MAX_TEXT = SPAN_BYTES - _LENGTH.size

Span = Callable[[str], AbstractContextManager[None]]
"""Opens a span of this name while a block runs."""


def no_span(name: str) -> AbstractContextManager[None]:
    """For work outside of a run's processes: nobody asks what it is doing."""
    return nullcontext()


class Spans:
    """The open spans of one process; call it with a name for a context manager. One thread only.

    `trace`: also record every finished span there.
    """

    def __init__(self, path: Path, trace: Trace | None = None) -> None:
        self.path = path
        self.trace = trace
        self._open: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                file.write(bytes(SPAN_BYTES))  # not a hole: on a full disk touching one ends the process by SIGBUS
                file.flush()
                self._page = mmap.mmap(file.fileno(), SPAN_BYTES)
        except OSError as error:
            raise PlanError(f"cannot write {path}: {error.strerror}; free disk space or change run.dir") from error
        if trace is not None:
            trace.calibrate(self)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Keep `name` in the file while the block runs; spans nest."""
        return _Open(self, "s", name)

    def order(self, method: str) -> AbstractContextManager[None]:
        """The same for a whole order of the controller."""
        return _Open(self, "c", method)

    def close(self) -> None:
        """Give the mapping back; the file stays. Idempotent."""
        self._page.close()
        if self.trace is not None:
            self.trace.close()

    def enter(self, name: str) -> None:
        self._open.append(name)
        self._write()

    def leave(self, kind: str, start: int) -> None:
        name = self._open.pop()
        self._write()
        if self.trace is not None:
            self.trace.add(kind, name, start, time.monotonic_ns())
            if kind == "c":
                self.trace.rest()

    def _write(self) -> None:
        text = " > ".join(self._open).encode()[-_MAX_TEXT:]
        self._page[: _LENGTH.size] = _LENGTH.pack(0)
        self._page[_LENGTH.size : _LENGTH.size + len(text)] = text
        self._page[: _LENGTH.size] = _LENGTH.pack(len(text))


class _Open:
    """One span while it is open; a class, because a generator's context manager takes twice as long."""

    __slots__ = ("_kind", "_name", "_spans", "_start")

    def __init__(self, spans: Spans, kind: str, name: str) -> None:
        self._spans, self._kind, self._name = spans, kind, name
        self._start = 0

    def __enter__(self) -> None:
        self._spans.enter(self._name)
        self._start = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.leave(self._kind, self._start)


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
