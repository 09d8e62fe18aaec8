"""How well a pack's predicted cost foretells its time (pure): one line of metrics.jsonl, `pack/cost_error(%)`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from flowtrain.packing.cost import CostModel
from flowtrain.runtime.decisions import Choice

PACE_PACKS = 64
"""Packs from which the pace of the next ones is taken."""


class Pace:
    """Seconds for one unit of predicted cost: a fitted model's own, else the middle one of what earlier packs took."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=PACE_PACKS)
        self._of: CostModel | None = None

    def error(self, choice: Choice, times: Sequence[tuple[int, float]]) -> float | None:
        """Mean relative error of the predicted times of a step's (cost, seconds); None while there is no pace yet."""
        if choice.cost != self._of:
            self._ratios.clear()
            self._of = choice.cost
        pace = choice.cost.real(1) if choice.source == "fitted" else median(self._ratios) if self._ratios else None
        self._ratios.extend(seconds / cost for cost, seconds in times if seconds > 0)
        if pace is None or not times:
            return None
        return fmean(abs(pace * cost / seconds - 1) for cost, seconds in times)
