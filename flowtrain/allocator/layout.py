"""A layout and its text, `r2f4t2c2p2e2` (contract C14), and which layouts this release can run."""

from __future__ import annotations

import re

from flowtrain.errors import PlanError
from flowtrain.plan import Layout

_LETTERS = {"r": "dp_replicate", "f": "dp_shard", "t": "tp", "c": "cp", "p": "pp", "e": "ep"}


def parse_layout(text: str, key: str) -> Layout:
    """The layout that `text` writes; degrees left out are 1.

    Raises:
        PlanError: it is no layout, or asks for more than copies; the sentence names `key`, where it stands.
    """
    parts = re.findall(r"([a-z])([1-9]\d*)", text)
    letters = [letter for letter, _ in parts]
    written = "".join(letter + degree for letter, degree in parts)
    if not parts or written != text or len(set(letters)) != len(letters) or not set(letters) <= _LETTERS.keys():
        raise PlanError(f"{key} is {text!r}, which is no layout: write degrees after their letters, such as r2")
    layout = Layout(**{_LETTERS[letter]: int(degree) for letter, degree in parts})
    if layout != Layout(dp_replicate=layout.dp_replicate):
        raise PlanError(f"{key} is {text!r}: only dp_replicate is supported by this release, such as r2")
    return layout


def layout_text(layout: Layout) -> str:
    """Degrees above 1, and always the number of copies.

    >>> layout_text(Layout(dp_replicate=2, tp=4))
    'r2t4'
    """
    degrees = [(letter, getattr(layout, name)) for letter, name in _LETTERS.items()]
    return "".join(f"{letter}{degree}" for letter, degree in degrees if letter == "r" or degree > 1)
