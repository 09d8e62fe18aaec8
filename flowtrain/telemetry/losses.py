"""Where the time of a run goes, by its timeline: shares, the critical path of a step, losses against the ideal (pure).

    ideal   device-seconds of the modules themselves (`MODEL_WORK`), every device busy with nothing else, by devices
    loss    device-seconds of anything else, by devices: with the ideal they add up to the step

The critical path goes back from the end of a step, always to what was waited for last: from an order to the order
before it on that rank or, where the rank was idle, to the answer upon which the controller sent it, and to the rank
that had given that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

from flowtrain.telemetry.timeline import MESSAGES, WAIT, Call, Piece, Timeline, Track

MODEL_WORK = frozenset({"encode", "forward", "backward", "optimizer"})

DEVICE_SIDES = ("producer", "consumer")

WAITS = {"producer": "stall: producers wait for room or orders", "consumer": "starvation: consumers wait for features"}

CONTROLLER = "controller"

MAX_STEPS = 100
"""The newest steps, which are looked at."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the critical path."""

    track: str
    name: str
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Of the steps looked at; seconds are per step.

    Attributes:
        steps: their numbers.
        step_seconds: mean.
        shares: by side, then by what was done: share of the side's time, 0 to 1.
        ideal_seconds: see the page above.
        losses: the same for what is not the modules' work, largest first; with `ideal_seconds` the step's seconds.
        path: what the critical path consists of, mean over the steps, largest first, as (track side, name).
        step: the step of middle length, whose critical path `segments` is, in order of time.
        cost_seconds: processor time of tracing, all processes, over the whole run.
    """

    steps: tuple[int, ...]
    step_seconds: float
    shares: dict[str, dict[str, float]]
    ideal_seconds: float
    losses: dict[str, float]
    path: dict[tuple[str, str], float]
    step: int
    segments: tuple[Segment, ...]
    cost_seconds: float


def break_down(timeline: Timeline, colocated: bool, warmup: int = 1) -> Breakdown | None:
    """None without two ended steps. The first `warmup` steps are left out where there are others.

    `colocated`: producer and consumer of a rank share a device, so that one's waiting is the other's work.
    """
    steps = (timeline.steps[warmup:] or timeline.steps)[-MAX_STEPS:]
    if not steps:
        return None
    windows = {index: window for index in steps if (window := timeline.step(index)) is not None}
    first, last = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    seconds = (last - first) / 1e9
    spent = {track.name: _spent(track, first, last) for track in timeline.tracks}
    by_side: dict[str, dict[str, float]] = {}
    for track in timeline.tracks:
        of_side = by_side.setdefault(track.side, defaultdict(float))
        for name, amount in spent[track.name].items():
            of_side[name] += amount
    by_side[CONTROLLER] = _named_time(timeline.controller, first, last)
    devices = [track for track in timeline.tracks if track.side in DEVICE_SIDES]
    num_devices = len(devices) // 2 if colocated else len(devices)
    ideal, losses = 0.0, defaultdict[str, float](float)
    for track in devices:
        for name, amount in spent[track.name].items():
            if name in MODEL_WORK:
                ideal += amount
            elif name not in (WAIT, MESSAGES):
                losses[f"{name} ({track.side})"] += amount
            elif not colocated:
                losses[WAITS[track.side] if name == WAIT else f"{name} ({track.side})"] += amount
    if colocated:
        busy = ideal + sum(losses.values())
        losses[f"{CONTROLLER}, readers and messages"] = max(num_devices * seconds - busy, 0.0)
    alone = colocated and num_devices == 1
    lanes = _lanes(timeline, colocated)
    paths = {
        index: tuple(in_turns(timeline, index) if alone else critical_path(timeline, index, lanes)) for index in steps
    }
    kinds = defaultdict[tuple[str, str], float](float)
    for segment in (segment for path in paths.values() for segment in path):
        kinds[segment.track.rpartition("-")[0] or segment.track, segment.name] += segment.seconds
    middle = median_low(end - start for start, end in windows.values())
    shown = next(index for index, (start, end) in windows.items() if end - start == middle)
    return Breakdown(
        steps=tuple(steps),
        step_seconds=seconds / len(steps),
        shares={side: _shares(amounts) for side, amounts in by_side.items()},
        ideal_seconds=ideal / num_devices / len(steps),
        losses={name: amount / num_devices / len(steps) for name, amount in _largest_first(losses)},
        path={kind: amount / len(steps) for kind, amount in _largest_first(kinds)},
        step=shown,
        segments=paths[shown],
        cost_seconds=sum(timeline.cost_seconds.values()),
    )


Lane = list[tuple[Call, Track]]
"""Orders that a process executes one after the other."""


def _lanes(timeline: Timeline, colocated: bool) -> dict[str, Lane]:
    """By track; tracks of a process share a lane."""
    lanes: dict[str, Lane] = {}
    of_process = defaultdict[str, Lane](list)
    for track in timeline.tracks:
        shared = colocated and track.side in DEVICE_SIDES
        lane = of_process[f"rank-{track.name.rpartition('-')[2]}" if shared else track.name]
        lane += [(call, track) for call in track.calls]
        lanes[track.name] = lane
    for lane in of_process.values():
        lane.sort(key=lambda order: order[0].start)
    return lanes


def critical_path(timeline: Timeline, step: int, lanes: Mapping[str, Lane] | None = None) -> list[Segment]:
    """The way back from the end of a step to its beginning, in order of time; its segments add up to the step.

    `lanes`: by track; each is its own where nothing is said.
    """
    lanes = _lanes(timeline, colocated=False) if lanes is None else lanes
    window = timeline.step(step)
    assert window is not None, f"step {step} is not in the trace"
    begin, at = window
    tracks = {track.name: track for track in timeline.tracks}
    ends = {name: [call.end for call in track.calls] for name, track in tracks.items()}
    answers = sorted(timeline.answers)
    found: list[Segment] = []

    def step_back(track: str, name: str, to: int) -> None:
        nonlocal at
        to = max(to, begin)
        if to < at:
            found.append(Segment(track, name, to, at))
            at = to

    def to_answer() -> tuple[Track, Call] | None:
        """From the controller at `at` to the order whose answer it had taken last."""
        number = bisect_right(answers, (at, "~", 0)) - 1
        while number >= 0:
            taken, name, _ = answers[number]
            orders = _until(tracks[name], ends[name], taken) if name in tracks else iter(())
            call = next((c for c in orders if c.taken == taken), None)
            step_back(CONTROLLER, "decide", taken)
            if call is not None:
                step_back(name, MESSAGES, call.end)
                return tracks[name], call
            number -= 1
        return None

    here = to_answer()
    while here is not None and at > begin:
        track, call = here
        for piece in reversed(call.pieces):
            step_back(track.name, piece.name, piece.start)
        lane = lanes[track.name]
        number = bisect_left(lane, call.start, key=lambda order: order[0].start)
        before, its_track = lane[number - 1] if number else (None, track)
        if call.sent is None or (before is not None and call.sent <= before.end):
            if before is None:
                break
            step_back(track.name, MESSAGES, before.end)
            here = its_track, before
        else:
            step_back(track.name, MESSAGES, call.sent)
            here = to_answer()
    step_back(CONTROLLER, "before the trace", begin)
    return found[::-1]


def in_turns(timeline: Timeline, step: int) -> Iterator[Segment]:
    """The way through a step where one process does everything: whatever it did, and the controller between."""
    window = timeline.step(step)
    assert window is not None, f"step {step} is not in the trace"
    at, end = window
    calls = ((call, track.name) for track in timeline.tracks for call in track.calls if call.end > at)
    pieces = ((piece, track) for call, track in calls if call.start < end for piece in call.pieces)
    for piece, track in sorted(pieces, key=lambda pair: pair[0].start):
        start, stop = max(piece.start, at), min(piece.end, end)
        if stop > start:
            if start > at:
                yield Segment(CONTROLLER, "decide", at, start)
            yield Segment(track, piece.name, start, stop)
            at = stop
    if end > at:
        yield Segment(CONTROLLER, "decide", at, end)


def _until(track: Track, ends: Sequence[int], at: int) -> Iterator[Call]:
    """Orders that had ended at `at`, the latest first."""
    return (track.calls[number] for number in range(bisect_right(ends, at) - 1, -1, -1))


def _spent(track: Track, first: int, last: int) -> dict[str, float]:
    """Seconds by name within the window; before its first order and after its last a rank waits."""
    spent = _named_time(track.pieces(), first, last)
    spent[WAIT] += max((last - first) / 1e9 - sum(spent.values()), 0.0)
    return spent


def _named_time(pieces: Iterable[Piece], first: int, last: int) -> dict[str, float]:
    spent = defaultdict[str, float](float)
    for piece in pieces:
        inside = min(piece.end, last) - max(piece.start, first)
        if inside > 0:
            spent[piece.name] += inside / 1e9
    return spent


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total for name, amount in _largest_first(amounts)} if total else {}


def _largest_first(amounts: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(amounts.items(), key=lambda pair: -pair[1])
