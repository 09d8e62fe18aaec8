"""The report as one HTML file: light and dark, no network, no script.

Bars of each side's time, the losses, and a timeline of the step of middle length with its critical path marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from flowtrain.telemetry.losses import MODEL_WORK
from flowtrain.telemetry.timeline import MESSAGES, WAIT, Piece, Timeline

if TYPE_CHECKING:
    from flowtrain.cli.report import Report

WIDTH, ROW, GAP, LABEL = 1000, 22, 8, 110

COLOURS = {
    "encode": "#4269d0",
    "forward": "#3ca951",
    "backward": "#2f7d3f",
    "optimizer": "#9498a0",
    "decode": "#ff725c",
    "preprocess": "#efb118",
    "put": "#97bbf5",
    "assemble": "#a463f2",
    "return gradient": "#ff8ab7",
    "reduce": "#9c6b4e",
    "read": "#6cc5b0",
    MESSAGES: "#c95f9b",
}
"""By name; what is not here is grey, waiting is nearly nothing."""

STYLE = """
:root { --ground: #ffffff; --text: #1c1e21; --quiet: #6a6f76; --line: #d9dce0; --wait: #eef0f2; --other: #b9bec5; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --text: #e6e8ea; --quiet: #9aa0a7; --line: #34383d; --wait: #24272b; --other: #6a6f76; } }
body { background: var(--ground); color: var(--text); font: 14px/1.5 system-ui, sans-serif; max-width: 1160px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .9rem .2rem 0; text-align: left;
       border-bottom: 1px solid var(--line) } td.number { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } text { fill: var(--text); font: 12px system-ui, sans-serif }
.quiet { color: var(--quiet) } .keys { margin: 0 0 .8rem } .key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
"""


def page(made: Report, timeline: Timeline) -> str:
    """The whole page."""
    from flowtrain.cli.report import headline

    found = made.breakdown
    figures = table((), ((name, value) for name, value in headline(made)))
    losses = table(
        ("loss against the ideal, a device", "ms a step", "of the step"),
        ((name, *_amounts(seconds, found.step_seconds)) for name, seconds in found.losses.items()),
    )
    path = table(
        ("critical path, mean over the steps", "ms a step", "of the step"),
        ((f"{side}: {name}", *_amounts(seconds, found.step_seconds)) for (side, name), seconds in found.path.items()),
    )
    names = {name for shares in found.shares.values() for name in shares}
    return document(
        f"Where the time of {made.run} goes",
        f"{figures}<h2>Share of each side's time</h2>{keys(names)}{_bars(found.shares)}<h2>Losses</h2>{losses}"
        f"<h2>Step {found.step}</h2>"
        f'<p class="quiet">The step of middle length; what its length depends on is underlined.</p>'
        f"{step_picture(made, timeline)}<h2>Critical path</h2>{path}",
    )


def document(title: str, body: str) -> str:
    """A whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _amounts(seconds: float, whole: float) -> tuple[str, str]:
    return f"{1000 * seconds:.1f}", f"{100 * seconds / whole:.1f} %"


def table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Text in the first column, figures and text in the others."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if n and cell[:1].isdigit() else ''}>{escape(cell)}</td>"
            for n, cell in enumerate(row)
        )
        for row in rows
    )
    return f"<table>{f'<tr>{cells}</tr>' if cells else ''}{body}</table>"


def _colour(name: str) -> str:
    return "var(--wait)" if name == WAIT else COLOURS.get(name, "var(--other)")


def keys(names: Iterable[str]) -> str:
    """Which colour is what."""
    order = sorted(names, key=lambda name: (name not in MODEL_WORK, name))
    found = (f'<span class="key"><i style="background:{_colour(name)}"></i>{escape(name)}</span>' for name in order)
    return f'<p class="keys">{"".join(found)}</p>'


def _bars(shares: dict[str, dict[str, float]]) -> str:
    parts = []
    for row, (side, amounts) in enumerate(shares.items()):
        y, x = row * (ROW + GAP), float(LABEL)
        parts.append(f'<text x="0" y="{y + 15}">{escape(side)}</text>')
        for name, share in amounts.items():
            width = share * (WIDTH - LABEL)
            parts.append(_box(x, y, width, name, f"{name}: {100 * share:.1f} %"))
            x += width
    return svg(len(shares) * (ROW + GAP), parts)


def step_picture(made: Report, timeline: Timeline, seconds: float | None = None) -> str:
    """The timeline of a report's step; the width of the picture is `seconds`, or the step's own."""
    found = made.breakdown
    window = timeline.step(found.step)
    assert window is not None, "the step was chosen among those of the trace"
    begin, end = window
    shown = end - begin if seconds is None else max(end - begin, round(seconds * 1e9))
    scale = (WIDTH - LABEL) / shown
    rows: dict[str, list[Piece]] = {track.name: list(track.pieces()) for track in timeline.tracks}
    rows["controller"] = timeline.controller
    parts = []
    for row, (name, pieces) in enumerate(rows.items()):
        y = row * (ROW + GAP)
        parts.append(f'<text x="0" y="{y + 15}">{escape(name)}</text>')
        for piece in _within(pieces, begin, end):
            x, width = LABEL + (piece.start - begin) * scale, (piece.end - piece.start) * scale
            parts.append(_box(x, y, width, piece.name, f"{piece.name}: {(piece.end - piece.start) / 1e6:.2f} ms"))
        for segment in found.segments:
            if segment.track == name:
                x, width = LABEL + (segment.start - begin) * scale, (segment.end - segment.start) * scale
                parts.append(f'<rect x="{x:.2f}" y="{y + ROW + 1}" width="{width:.2f}" height="3" fill="var(--text)"/>')
    height = len(rows) * (ROW + GAP)
    parts.append(f'<text x="{LABEL}" y="{height + 12}">0</text>')
    parts.append(f'<text x="{WIDTH}" y="{height + 12}" text-anchor="end">{shown / 1e6:.1f} ms</text>')
    return svg(height + 16, parts)


def _within(pieces: Iterable[Piece], begin: int, end: int) -> Iterator[Piece]:
    for name, start, stop in pieces:
        if stop > begin and start < end:
            yield Piece(name, max(start, begin), min(stop, end))


def _box(x: float, y: float, width: float, name: str, told: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{ROW}" fill="{_colour(name)}">'
        f"<title>{escape(told)}</title></rect>"
    )


def svg(height: int, parts: Iterable[str]) -> str:
    """A picture as wide as the page."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
