"""Standard streams that the caller has closed, or whose reader goes away: neither ends a run."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def open_standard() -> None:
    """Let descriptors 0 to 2 lead nowhere where they are closed (`>&-`); call before any file is opened.

    Else the next file that is opened gets such a number, and what a child prints goes into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:  # what Python makes of a closed one
            setattr(sys, name, os.fdopen(os.dup(number), mode, encoding="utf-8"))


def escape_letters() -> None:
    """Show what the encoding of stdout or stderr lacks as `\\xdf`, rather than fail for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(text: str, *, end: str = "\n", stream: TextIO | None = None) -> bool:
    """Print on stderr, or on `stream`; returns whether somebody can read it. Never raises."""
    stream = stream or sys.stderr
    try:
        print(text, end=end, file=stream, flush=True)
    except (OSError, ValueError):
        give_up(stream)
        return False
    return True


def reader_gone(stream: TextIO | int) -> bool:
    """Whether what is written to `stream`, or to a descriptor, can reach nobody any more, as behind `| head`."""
    poll = select.poll()
    try:
        poll.register(stream if isinstance(stream, int) else stream.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def give_up(stream: TextIO) -> None:
    """What is still to be written, here or as the process ends, goes nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
