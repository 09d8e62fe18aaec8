"""The page of a benchmark: bars per mode against the limits, and a step of each mode on one scale of time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from flowtrain.cli.bench_result import RATE
from flowtrain.cli.report_page import GAP, LABEL, ROW, WIDTH, document, keys, step_picture, svg, table

if TYPE_CHECKING:
    from flowtrain.cli.bench import Bench

NAME = 170
TEXT = 130
"""Room that a rate takes inside its bar."""


def bench_page(found: Bench) -> str:
    """The whole page."""
    reports = found.reports
    rates = [(*row, _losses(found, row[0])) for row in found.rates]
    rates += [(*row, "") for row in found.rates_of_limits]
    head = ("mode", f"{RATE} (spread)", f"{found.reference} / it", "schedule / it", "largest losses, a device and step")
    note = "" if found.incomplete is None else f"<p><strong>{escape(found.incomplete)}</strong></p>"
    longest = max(made.breakdown.step_seconds for made, _ in reports.values())
    names = {name for made, _ in reports.values() for shares in made.breakdown.shares.values() for name in shares}
    steps = "".join(
        f"<h3>{escape(mode)}</h3>{step_picture(made, timeline, longest)}" for mode, (made, timeline) in reports.items()
    )
    return document(
        "Modes compared",
        f"{note}{_bars(found)}<h2>Figures</h2>{table(head, rates)}"
        f'<p class="quiet">Medians of the runs; losses against the ideal, of the last run.</p>{table(*found.figures)}'
        f'<p class="quiet">{"<br>".join(map(escape, found.peaks))}</p>'
        f"<h2>A step of each mode</h2>{keys(names)}"
        f'<p class="quiet">The step of middle length of the last run, all on one scale; what its length depends on is '
        f"underlined.</p>{steps}",
    )


def _losses(found: Bench, mode: str) -> str:
    losses = list(found.reports[mode][0].breakdown.losses.items())[:3]
    return "; ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in losses)


def _bars(found: Bench) -> str:
    rates = {name: figures[RATE].median for name, figures in found.summary.items()}
    limits = found.limits
    scale = (WIDTH - NAME - LABEL) / max((*rates.values(), *limits.values()))
    parts = []
    for row, (name, rate) in enumerate(rates.items()):
        y = row * (ROW + GAP)
        parts.append(f'<text x="0" y="{y + 15}">{escape(name)}</text>')
        parts.append(f'<rect x="{NAME}" y="{y}" width="{rate * scale:.1f}" height="{ROW}" fill="#4269d0"/>')
        inside = rate * scale > TEXT
        x, style = (NAME + 6, ' style="fill:#fff"') if inside else (NAME + rate * scale + 6, "")
        parts.append(f'<text x="{x:.1f}" y="{y + 15}"{style}>{rate:.2f} {RATE}</text>')
    height = len(rates) * (ROW + GAP)
    for number, (name, rate) in enumerate(sorted(limits.items(), key=lambda pair: pair[1])):
        x, y = NAME + rate * scale, height + 14 * (number + 1)
        parts.append(f'<path d="M{x:.1f} 0V{height}" stroke="var(--text)" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="end">{escape(name)} {rate:.2f}</text>')
    return svg(height + 14 * (len(limits) + 1), parts)
