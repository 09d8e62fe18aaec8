"""The load of every pack, rank by rank and slot by slot, for two policies side by side: on a terminal, and as PNG.

              arrival                     dynamic
    rank 0    ▇▇▃▃▇▇▁▁ …                  ▇▇▇▇▇▇▇▇ …        a column is a slot, steps are set apart
    rank 1    ▅▅▇▇▂▂▇▇ …                  ▇▇▇▇▇▇▇▇ …        dark: as dear as the dearest pack of the slot

What is light is time that the rank waits in lock-step for the dearest pack of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

    from flowtrain.types import Pack, Step

Shares = list[list[list[float]]]
"""`shares[step][slot][rank]`: cost of a pack over the dearest of its slot, 0 to 1."""

MOST_RANKS = 16
"""Ranks shown on a terminal; `PICTURE_RANKS` in the picture."""
PICTURE_RANKS = 64
PICTURE_SLOTS = 64

_LIGHT, _DARK = (247, 244, 230), (20, 66, 114)
_BLOCKS = " ▁▂▃▄▅▆▇█"


def shares_of(steps: Sequence[Step]) -> Shares:
    """Loads as the picture shows them; a slot without work is all 1: nobody waits."""
    return [[_shares(slot) for slot in step.slots] for step in steps]


def _shares(slot: Sequence[Pack]) -> list[float]:
    dearest = max(pack.cost for pack in slot)
    return [pack.cost / dearest if dearest else 1.0 for pack in slot]


def colour(share: float) -> tuple[int, int, int]:
    """Light where a rank waits, dark where it works; half the scale lies above 0.8, where good policies differ."""
    stretched = max(0.0, min(1.0, share)) ** 3
    red, green, blue = (round(a + (b - a) * stretched) for a, b in zip(_LIGHT, _DARK, strict=True))
    return red, green, blue


def show_picture(shown: Sequence[tuple[str, Sequence[Step]]]) -> None:
    """Print the first steps that fit the width; without colour, block characters stand for the load."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    label_width = 9
    width = (console.width - label_width) // max(1, len(shown)) - 2
    panels = [(name, _fitting(shares_of(steps), width)) for name, steps in shown]
    num_ranks = max((len(slots[0]) for _, shares in panels for slots in shares[:1]), default=0)
    coloured = console.color_system is not None
    head = Text(" " * label_width)
    for name, shares in panels:
        head.append(name.ljust(_width(shares) + 2))
    console.print(head)
    for rank in range(min(num_ranks, MOST_RANKS)):
        line = Text(f"rank {rank}".ljust(label_width))
        for _, shares in panels:
            for slots in shares:
                for slot in slots:
                    share = slot[rank]
                    if coloured:
                        line.append(" ", style=f"on rgb({','.join(map(str, colour(share)))})")
                    else:
                        line.append(_BLOCKS[round(share * (len(_BLOCKS) - 1))])
                line.append(" ")
            line.append(" ")
        console.print(line)
    more = f"; {num_ranks - MOST_RANKS} more ranks" if num_ranks > MOST_RANKS else ""
    console.print(Text(f"a column is a slot; light: the rank waits for the dearest pack of the slot{more}"))


def write_picture(path: Path, shown: Sequence[tuple[str, Sequence[Step]]], title: str) -> None:
    """The same as PNG: up to `PICTURE_RANKS` ranks and `PICTURE_SLOTS` slots a policy."""
    from PIL import Image, ImageDraw

    from flowtrain.cli.rundir import writing

    cell, gap, margin, head = 9, 3, 16, 40
    panels = [(name, _fitting(shares_of(steps), PICTURE_SLOTS + len(steps))) for name, steps in shown]
    num_ranks = min(PICTURE_RANKS, max(len(shares[0][0]) for _, shares in panels))
    widths = [sum(len(slots) * cell + gap for slots in shares) for _, shares in panels]
    size = (sum(widths) + margin * (len(panels) + 1), max(num_ranks * cell, cell) + head + 3 * margin)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((margin, 6), f"{title}: load of each pack over the dearest of its slot (rows: ranks)", fill="black")
    left = margin
    for (name, shares), width in zip(panels, widths, strict=True):
        draw.text((left, head - 14), name, fill="black")
        _draw_panel(draw, shares, (left, head), cell, gap, num_ranks)
        left += width + margin
    _draw_scale(draw, (margin, head + num_ranks * cell + margin))
    with writing(path):
        image.save(path, format="PNG")


def _draw_panel(draw: ImageDraw, shares: Shares, corner: tuple[int, int], cell: int, gap: int, num_ranks: int) -> None:
    x, top = corner
    for slots in shares:
        for slot in slots:
            for rank, share in enumerate(slot[:num_ranks]):
                y = top + rank * cell
                draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=colour(share))
            x += cell
        x += gap


def _draw_scale(draw: ImageDraw, corner: tuple[int, int]) -> None:
    x, y = corner
    for step in range(11):
        draw.rectangle((x + 12 * step, y, x + 12 * step + 11, y + 9), fill=colour(step / 10))
    draw.text((x + 140, y - 1), "0 to 1", fill="black")


def _fitting(shares: Shares, width: int) -> Shares:
    """The first steps whose slots, one column each and one between steps, fit; at least a part of the first."""
    kept: Shares = []
    for slots in shares:
        if kept and _width([*kept, slots]) > width:
            break
        kept.append(slots[: max(1, width - 1)])
    return kept


def _width(shares: Shares) -> int:
    return sum(len(slots) + 1 for slots in shares)
