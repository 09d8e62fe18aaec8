"""What `flowtrain simulate` shows: figures, a timeline on the terminal and as PNG, JSON.

producer 0  ▇▇▇▇▒▒▒▒··▇▇▇▇        ▇ encode, train    ▒ backward    ▚ reduce, update, save    · waits
consumer 0  ··▇▇▇▇▇▇▇▇▚▇▇▇
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowtrain.cli.simulate import Subject
    from flowtrain.simulator import Outcome
    from flowtrain.simulator.outcome import RankSpan

COLOURS = {
    "encode": (84, 160, 84),
    "backward": (163, 201, 126),
    "train": (20, 66, 114),
    "reduce": (200, 120, 40),
    "update": (222, 168, 70),
    "save": (150, 60, 60),
}
MARKS = {"encode": "▇", "train": "▇", "backward": "▒", "reduce": "▚", "update": "▚", "save": "▚"}
LABEL = 12
PERCENTS = {
    "consumer_busy_percent": "consumers at work",
    "starvation_percent": "consumers starved",
    "lock_step_percent": "consumers waiting within a slot",
    "reduce_wait_percent": "consumers waiting for the reduction",
    "update_wait_percent": "consumers waiting for the update",
    "producer_busy_percent": "producers at work",
    "stall_percent": "producers stalled",
    "control_percent": "controller busy",
    "lost_percent": "lost by failures",
}


def print_outcome(subject: Subject, outcome: Outcome, effects: Mapping[str, float]) -> None:
    """Figures as a table."""
    from rich.console import Console
    from rich.table import Table

    planned = subject.planned
    found = outcome.figures(planned.peak_flops)
    console = Console(highlight=False, markup=False)
    console.print(f"{subject.name}: {subject.layouts}", soft_wrap=True)
    system = planned.system
    console.print(
        f"{outcome.num_devices} devices, {system.num_producers} producers, {system.num_consumers} consumers, "
        f"{len(outcome.steps)} steps in {outcome.seconds:.4g} simulated seconds",
        soft_wrap=True,
    )
    table = Table("figure", "value")
    table.add_row("samples/s", f"{found['samples_per_second']:.4g}")
    table.add_row("tokens/s a device", f"{found['tokens_per_second_per_device']:.4g}")
    table.add_row("MFU", f"{found['mfu_percent']:.1f} %")
    table.add_row("seconds of a step", f"{found['step_seconds']:.4g}")
    table.add_row("imbalance of consumers, max / mean", f"{found['imbalance']:.4f}")
    for name, label in PERCENTS.items():
        table.add_row(label, f"{found[name]:.2f} % of the time")
    table.add_row("answers a step", f"{found['answers_per_step']:.0f}")
    if outcome.failures:
        table.add_row("failures", str(outcome.failures))
    for name, gain in effects.items():
        table.add_row(name, f"{gain + 0.0:+.1f} % samples/s")
    console.print(table)
    for note in planned.notes:
        console.print(f"note: {note}", soft_wrap=True)


def write_result(path: Path, subject: Subject, outcome: Outcome, effects: Mapping[str, float]) -> None:
    from flowtrain.cli.rundir import write_json

    planned = subject.planned
    content: dict[str, Any] = {
        "name": subject.name,
        "layouts": subject.layouts,
        "producers": planned.system.num_producers,
        "consumers": planned.system.num_consumers,
        **outcome.to_dict(planned.peak_flops),
        "sensitivity_percent": dict(effects),
        "notes": list(planned.notes),
    }
    write_json(path, content)


# --- timeline ---------------------------------------------------------------------------------------------------------


def lines_of(spans: Sequence[RankSpan]) -> dict[str, list[RankSpan]]:
    """Spans by `producer 0`, `consumer 0` …, producers first."""
    found: dict[str, list[RankSpan]] = {}
    for span in sorted(spans, key=lambda span: (span.role.value == "consumer", span.rank)):
        found.setdefault(f"{span.role.value} {span.rank}", []).append(span)
    return found


def show_timeline(outcome: Outcome) -> None:
    """Print the first steps of some ranks: each column is a piece of the time."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not outcome.spans:
        return
    width = max(20, console.width - LABEL)
    end = max(span.end for span in outcome.spans)
    for name, spans in lines_of(outcome.spans).items():
        line = ["·"] * width
        for span in spans:
            first, last = int(span.start / end * width), int(span.end / end * width)
            # A piece is told by what it begins with.
            for column in range(first, min(width, max(last, first + (span.end > span.start)))):
                line[column] = MARKS[span.kind]
        console.print(name.ljust(LABEL) + "".join(line), soft_wrap=True)
    console.print(f"{end:.4g} s; ▇ encode, train  ▒ backward  ▚ reduce, update, save  · waits")


def write_timeline(path: Path, outcome: Outcome, title: str) -> None:
    """The same as PNG, with the ends of steps as lines."""
    from PIL import Image, ImageDraw

    from flowtrain.cli.rundir import writing

    width, height, left, top, gap = 1400, 16, 90, 40, 4
    lines = lines_of(outcome.spans)
    image = Image.new("RGB", (width + left + 20, top + len(lines) * (height + gap) + 60), "white")
    draw = ImageDraw.Draw(image)
    draw.text((left, 8), title, fill="black")
    end = max((span.end for span in outcome.spans), default=1.0)
    bottom = top + len(lines) * (height + gap)
    for number, (name, spans) in enumerate(lines.items()):
        y = top + number * (height + gap)
        draw.text((8, y + 2), name, fill="black")
        draw.rectangle((left, y, left + width, y + height), fill=(242, 242, 238))
        for span in spans:
            x0, x1 = left + span.start / end * width, left + span.end / end * width
            draw.rectangle((x0, y, max(x0, x1 - 0.5), y + height), fill=COLOURS[span.kind])
    for step in outcome.steps:
        if step.end <= end:
            x = left + step.end / end * width
            draw.line((x, top - 6, x, bottom), fill=(120, 120, 120))
            draw.text((x - 20, top - 18), f"step {step.step}", fill=(90, 90, 90))
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = left + 110 * number
        draw.rectangle((x, bottom + 14, x + 12, bottom + 26), fill=colour)
        draw.text((x + 18, bottom + 14), kind, fill="black")
    draw.text((left, bottom + 36), f"0 to {end:.4g} s", fill="black")
    with writing(path):
        image.save(path, format="PNG")
