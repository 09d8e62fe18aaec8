"""The traces of a run as one timeline: tracks on one clock, every moment of an order named, what lies between as well.

    traces/*.jsonl ──read_timeline──▶ Timeline ──chrome_events──▶ trace.json, for Perfetto
                                          └────────────────────▶ `flowtrain.telemetry.losses`, for `flowtrain report`

Between two orders a rank waits until the next one is sent (`wait`); from then on the order is on its way (`messages`).
An order's k-th sending is its k-th execution, because orders to a rank are executed as they were sent.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowtrain.telemetry.trace import CONTROLLER, TRACE_FOLDER

TRACE_FILE = "trace.json"

WAIT, MESSAGES = "wait", "messages"

ORDER_WORK = {"update": "optimizer", "train": "assemble", "encode": "other", "backward": "return gradient"}
"""What an order does outside of its inner spans, where it is not called by its method's name."""

EXECUTED = (*ORDER_WORK, "read", "reduce")
"""Orders that a process records whenever it executes them."""

SIDES = ("reader", "producer", "consumer")

PROCESS = re.compile(rf"{CONTROLLER}|({'|'.join(SIDES)})-\d+")
"""Names of files in the folder of the traces."""


class Piece(NamedTuple):
    """Nanoseconds of the controller's clock."""

    name: str
    start: int
    end: int


class Call(NamedTuple):
    """One order: executed from `start` to `end`; `sent` and `taken` by the controller (None: not known); `slots` of the
    step that it worked for."""

    method: str
    start: int
    end: int
    sent: int | None
    taken: int | None
    pieces: tuple[Piece, ...]
    slots: tuple[int, ...] = ()


@dataclass(slots=True)
class Track:
    """One process."""

    name: str
    calls: list[Call] = field(default_factory=list)

    @property
    def side(self) -> str:
        return self.name.rpartition("-")[0]

    def pieces(self) -> Iterator[Piece]:
        """All of its time from the first order to the last, without gaps or overlaps."""
        before: int | None = None
        for call in self.calls:
            if before is not None and call.start > before:
                sent = min(max(call.sent if call.sent is not None else call.start, before), call.start)
                yield from (
                    p for p in (Piece(WAIT, before, sent), Piece(MESSAGES, sent, call.start)) if p.end > p.start
                )
            yield from call.pieces
            before = call.end


@dataclass(slots=True)
class Timeline:
    """`marks`: when the update of each step was sent. `cost_seconds`: processor time that tracing took, by process.
    `whole_until`: when the first order was sent that its process did not record, because it records a bounded number of
    events or was killed; None where all are there."""

    tracks: list[Track]
    controller: list[Piece]
    marks: dict[int, int]
    answers: list[tuple[int, str, int]]
    cost_seconds: dict[str, float]
    whole_until: int | None = None

    def step(self, index: int) -> tuple[int, int] | None:
        """From the update before to the step's own; None for one that is not in the trace from end to end."""
        if index not in self.marks or index - 1 not in self.marks:
            return None
        begin, end = self.marks[index - 1], self.marks[index]
        whole = begin < end and (self.whole_until is None or end <= self.whole_until)
        return (begin, end) if whole else None

    @property
    def steps(self) -> list[int]:
        return [index for index in sorted(self.marks) if self.step(index) is not None]


def read_timeline(run_dir: Path) -> Timeline | None:
    """None when there are no traces. A line torn by a kill is left out, and so are files of other names."""
    files = [file for file in sorted((run_dir / TRACE_FOLDER).glob("*.jsonl")) if PROCESS.fullmatch(file.stem)]
    if not files:
        return None
    timeline = Timeline([], [], {}, [], {})
    sent: dict[tuple[str, str], list[int]] = defaultdict(list)
    slots: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
    taken: dict[tuple[str, str], list[int]] = defaultdict(list)
    offsets: dict[str, int] = {}
    for event in _events(run_dir / TRACE_FOLDER / f"{CONTROLLER}.jsonl"):
        match event:
            case ["q", str(track), str(method), *of_step, int(at)]:
                sent[track, method].append(at)
                slots[track, method].append(tuple(of_step))
            case ["a", str(track), str(method), int(at)]:
                timeline.answers.append((at, track, len(taken[track, method])))
                taken[track, method].append(at)
            case ["m", int(step), int(at)]:
                timeline.marks[step] = at
            case ["o", str(track), int(nanoseconds)]:
                offsets[track] = nanoseconds
            case ["s", str(name), int(start), int(end)]:
                timeline.controller.append(Piece(name, start, end))
            case ["t", _, int(nanoseconds)]:
                timeline.cost_seconds[CONTROLLER] = nanoseconds / 1e9
    for file in files:
        if file.stem != CONTROLLER:
            orders = sent, slots, taken
            timeline.tracks.append(_track(file, offsets.get(file.stem, 0), orders, timeline.cost_seconds))
    executed = Counter((track.name, call.method) for track in timeline.tracks for call in track.calls)
    missing = (
        times[executed[track, method]]
        for (track, method), times in sent.items()
        if method in EXECUTED and executed[track, method] < len(times)
    )
    timeline.whole_until = min(missing, default=None)
    timeline.tracks.sort(key=lambda track: (SIDES.index(track.side), int(track.name.rpartition("-")[2])))
    return timeline


Times = dict[tuple[str, str], list[int]]
Orders = tuple[Times, dict[tuple[str, str], list[tuple[int, ...]]], Times]
"""When the orders of a kind to a track were sent, their slots, and when their answers were taken."""


def _track(file: Path, offset: int, orders: Orders, cost_seconds: dict[str, float]) -> Track:
    sent, slots, taken = orders
    track, inner, counts = Track(file.stem), list[Piece](), defaultdict[str, int](int)
    for event in _events(file):
        match event:
            case ["s", str(name), int(start), int(end)]:
                inner.append(Piece(name, start - offset, end - offset))
            case ["c", str(method), int(start), int(end)]:
                number, key = counts[method], (track.name, method)
                counts[method] += 1
                start, end = start - offset, end - offset
                pieces = tuple(flat(ORDER_WORK.get(method, method), start, end, inner))
                inner = []
                was_sent, was_taken = _at(sent[key], number), _at(taken[key], number)
                of_step = slots[key][number] if number < len(slots[key]) else ()
                track.calls.append(Call(method, start, end, was_sent, was_taken, pieces, of_step))
            case ["t", _, int(nanoseconds)]:
                cost_seconds[track.name] = nanoseconds / 1e9
    return track


def _at(times: list[int], number: int) -> int | None:
    return times[number] if number < len(times) else None


def flat(name: str, start: int, end: int, inner: list[Piece]) -> Iterator[Piece]:
    """An order's time as pieces behind each other: the innermost span that covers a moment has it."""
    at = start
    for piece in sorted(inner, key=lambda piece: (piece.start, -piece.end)):
        if piece.start > at:
            yield Piece(name, at, piece.start)
        if piece.end > at:
            yield Piece(piece.name, max(piece.start, at), piece.end)
            at = piece.end
    if end > at:
        yield Piece(name, at, end)


def _events(file: Path) -> Iterator[Any]:
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """The timeline in Chrome's JSON form: a process a track, an arrow from the sending of an order to its execution."""
    rows = {track.name: row for row, track in enumerate(timeline.tracks, start=1)}
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(json.dumps(_label(CONTROLLER, 0)))
        for event in _chrome_events(timeline, rows):
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")
    aside.replace(path)


def _chrome_events(timeline: Timeline, rows: dict[str, int]) -> Iterator[dict[str, Any]]:
    for piece in timeline.controller:
        yield _box(piece, 0)
    for step, at in timeline.marks.items():
        yield {"name": f"end of step {step}", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at / 1e3}
    arrow = 0
    for track in timeline.tracks:
        row = rows[track.name]
        yield _label(track.name, row)
        for piece in track.pieces():
            yield _box(piece, row)
        for call in track.calls:
            if call.sent is not None:
                arrow += 1
                start = {"name": call.method, "cat": "order", "ph": "s", "id": arrow, "pid": 0, "tid": 0}
                start["args"] = {"slots": call.slots}
                yield start | {"ts": call.sent / 1e3}
                yield start | {"ph": "f", "bp": "e", "pid": row, "ts": call.start / 1e3}


def _label(name: str, row: int) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": row, "tid": 0, "args": {"name": name}}


def _box(piece: Piece, row: int) -> dict[str, Any]:
    start, seconds = piece.start / 1e3, (piece.end - piece.start) / 1e3
    return {"name": piece.name, "ph": "X", "pid": row, "tid": 0, "ts": start, "dur": seconds}
