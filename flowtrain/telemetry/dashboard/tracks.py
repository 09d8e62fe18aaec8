"""The newest stretch of a traced run's timeline, kept while the run goes on: `timeline` reads a whole one.

Of each process the last `HELD_PIECES` pieces of work are held, of the controller the ends of the last steps. Time
between two orders of a process is waiting.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from flowtrain.telemetry.dashboard.foreign import parsed
from flowtrain.telemetry.dashboard.tail import Tail
from flowtrain.telemetry.timeline import ORDER_WORK, SIDES, Piece, flat
from flowtrain.telemetry.trace import CONTROLLER, TRACE_FOLDER

HELD_PIECES = 4000
HELD_STEPS = 200
SHOWN_PIECES = 12_000
"""Of one answer, all tracks together; the shortest are left out first."""


class _Track:
    def __init__(self, path: Path, root: Path) -> None:
        self.tail = Tail(path, root)
        self.name = path.stem
        self.pieces: deque[Piece] = deque(maxlen=HELD_PIECES)
        self.inner: list[Piece] = []

    def poll(self) -> list[list[Any]]:
        """Events of the controller's kind; pieces of work are kept here."""
        anew, lines = self.tail.read()
        if anew:
            self.pieces.clear()
            self.inner.clear()
        events = []
        for line in lines:
            match event := parsed(line):
                case ["s", str(name), int(start), int(end)] if self.name == CONTROLLER:
                    self.pieces.append(Piece(name, start, end))
                case ["s", str(name), int(start), int(end)]:
                    self.inner.append(Piece(name, start, end))
                case ["c", str(method), int(start), int(end)]:
                    self.pieces.extend(flat(ORDER_WORK.get(method, method), start, end, self.inner))
                    self.inner.clear()
                case list():
                    events.append(event)
        return events


class Tracks:
    """`version` is another number when there is something new; `problem`: which file cannot be read, and why."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tracks: dict[str, _Track] = {}
        self._marks: deque[tuple[int, int]] = deque(maxlen=HELD_STEPS)
        self._offsets: dict[str, int] = {}
        self.version = 0
        self.problem: str | None = None

    def poll(self) -> bool:
        """Read on; whether there is more to read."""
        try:
            found = sorted(path for path in (self._root / TRACE_FOLDER).iterdir() if path.suffix == ".jsonl")
        except FileNotFoundError:
            return False
        except OSError as error:
            self.problem = f"{TRACE_FOLDER} cannot be read: {error.strerror}"
            return False
        self.problem = None
        for path in found:
            side = path.stem.rpartition("-")[0]
            if path.stem not in self._tracks and (side in SIDES or path.stem == CONTROLLER):
                self._tracks[path.stem] = _Track(path, self._root)
        more = False
        for track in self._tracks.values():
            before = track.tail.offset
            for event in track.poll():
                match event:
                    case ["m", int(step), int(at)]:
                        while self._marks and self._marks[-1][0] >= step:
                            self._marks.pop()
                        self._marks.append((step, at))
                    case ["o", str(name), int(nanoseconds)]:
                        self._offsets[name] = nanoseconds
            self.version += track.tail.offset != before
            more = more or not track.tail.at_end
            if track.tail.problem is not None:
                self.problem = f"{TRACE_FOLDER}/{track.name}.jsonl cannot be read: {track.tail.problem}"
        return more

    def newest(self, num_steps: int) -> dict[str, Any] | None:
        """The last steps, in microseconds from their beginning: JSON ready; None without a whole step.

        `tracks`: `{name, pieces: [[name, start, length], …], shares: {name: share of the time}}`.
        """
        marks = list(self._marks)
        if len(marks) < 2:
            return None
        chosen = marks[-min(num_steps + 1, len(marks)) :]
        begin, end = chosen[0][1], chosen[-1][1]
        names = sorted(self._tracks, key=_order)
        cut = {name: list(self._within(name, begin, end)) for name in names}
        lengths = sorted((length for pieces in cut.values() for _, _, length in pieces), reverse=True)
        least = lengths[SHOWN_PIECES] if len(lengths) > SHOWN_PIECES else -1
        return {
            "steps": [chosen[0][0] + 1, chosen[-1][0]],
            "marks": [[step, (at - begin) // 1000] for step, at in chosen],
            "length": (end - begin) // 1000,
            "tracks": [
                {
                    "name": name,
                    "shares": _shares(pieces, (end - begin) // 1000),
                    "pieces": [piece for piece in pieces if piece[2] > least],
                }
                for name, pieces in cut.items()
            ],
        }

    def _within(self, name: str, begin: int, end: int) -> list[tuple[str, int, int]]:
        offset, found = self._offsets.get(name, 0), []
        for what, start, stop in self._tracks[name].pieces:
            start, stop = max(start - offset, begin), min(stop - offset, end)
            if stop > start:
                found.append((what, (start - begin) // 1000, (stop - start) // 1000))
        return found


def _order(name: str) -> tuple[int, int]:
    side, _, rank = name.rpartition("-")
    return (-1, 0) if name == CONTROLLER else (SIDES.index(side), int(rank) if rank.isdecimal() else 0)


def _shares(pieces: list[tuple[str, int, int]], length: int) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, _, taken in pieces:
        shares[name] = shares.get(name, 0) + taken / max(length, 1)
    return shares
