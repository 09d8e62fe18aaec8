"""All steps of a run in bounded memory: least, largest and last value a bucket, so that a spike of one step stays.

    step     1 2 3 4 5 6 7 8       more than `MOST_BUCKETS`       1-2   3-4   5-6   7-8
    bucket   1 step wide           ───── neighbours merge ─────▶  2 steps wide

Invariants: buckets are aligned and equally wide; the last value of the last bucket is that of the newest record; a
value that is null or absent is NaN here and null outside.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

MOST_BUCKETS = 1200
"""A chart is some hundred pixels wide."""

NAN = math.nan


class Series:
    """One metric; three columns, one entry a bucket."""

    __slots__ = ("last", "least", "most")

    def __init__(self) -> None:
        self.least, self.most, self.last = array("d"), array("d"), array("d")

    def put(self, bucket: int, value: float) -> None:
        """`value` of a step of this bucket, which is the last one or a new one behind it."""
        value = float(value)  # OverflowError before anything is changed
        missing = bucket - len(self.last)
        if missing < 0:
            if value < self.least[bucket] or self.least[bucket] != self.least[bucket]:
                self.least[bucket] = value
            if value > self.most[bucket] or self.most[bucket] != self.most[bucket]:
                self.most[bucket] = value
            self.last[bucket] = value
            return
        for column in (self.least, self.most, self.last):
            if missing:
                column.extend([NAN] * missing)
            column.append(value)

    def merged(self, groups: list[int], count: int) -> Series:
        """`groups`: for each bucket the one that it becomes a part of."""
        made = Series()
        for old, value in enumerate(self.last):
            if value == value:
                made.put(groups[old], self.least[old])
                made.put(groups[old], self.most[old])
                made.put(groups[old], value)
        return made


class History:
    """Records of one run, in the order of their steps.

    Attributes:
        width: steps a bucket.
        generation: another number when buckets that were read are no longer what they were.
        latest: the newest record.
    """

    def __init__(self, most_buckets: int = MOST_BUCKETS) -> None:
        assert most_buckets > 1
        self._most_buckets = most_buckets
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self.width = 1
        self.latest: dict[str, Any] = {}
        self._keys: list[int] = []
        self._last_steps: list[int] = []
        self._series: dict[str, Series] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def step(self) -> int:
        return self._last_steps[-1] if self._last_steps else 0

    @property
    def names(self) -> list[str]:
        """Metrics that are numbers, in the order in which records showed them."""
        return list(self._series)

    def restart(self) -> None:
        """The file of records has begun anew."""
        self._clear()
        self.generation += 1

    def add(self, record: Mapping[str, Any]) -> None:
        """One record; one that goes back to a step already there is left out."""
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.step:
            return
        key = (step - 1) // self.width
        if not self._keys or self._keys[-1] != key:
            if len(self._keys) == self._most_buckets:
                self._widen()
                key = (step - 1) // self.width
            if not self._keys or self._keys[-1] != key:
                self._keys.append(key)
                self._last_steps.append(step)
        self._last_steps[-1] = step
        bucket, series = len(self._keys) - 1, self._series
        for name, value in record.items():
            if type(value) is float or type(value) is int:
                known = series.get(name)
                if known is None:
                    if name == "step":
                        continue
                    known = series[name] = Series()
                try:
                    known.put(bucket, value)
                except OverflowError:
                    continue  # no double holds it: as if it were not there
            elif value is None and name not in series:
                series[name] = Series()
        self.latest = dict(record)

    def _widen(self) -> None:
        while len(self._keys) == self._most_buckets:
            self.width *= 2
            keys, groups = list[int](), list[int]()
            last_steps = list[int]()
            for key, step in zip(self._keys, self._last_steps, strict=True):
                if not keys or keys[-1] != key // 2:
                    keys.append(key // 2)
                    last_steps.append(step)
                last_steps[-1] = step
                groups.append(len(keys) - 1)
            self._keys, self._last_steps = keys, last_steps
            self._series = {name: series.merged(groups, len(keys)) for name, series in self._series.items()}
        self.generation += 1

    def columns(self, names: Iterable[str], start: int = 0) -> dict[str, Any]:
        """What a page shows of these metrics, from bucket `start` on: JSON ready.

        `steps`: the last step of each bucket; `series`: by name `[last]`, or `[last, least, most]` where
        buckets are wider than a step.
        """
        count = len(self._keys)
        start = min(max(start, 0), count)
        series = {}
        for name in names:
            if name in self._series:
                found = self._series[name]
                columns = (found.last,) if self.width == 1 else (found.last, found.least, found.most)
                series[name] = [_outside(column, start, count) for column in columns]
        return {
            "generation": self.generation,
            "width": self.width,
            "start": start,
            "steps": self._last_steps[start:],
            "series": series,
        }


def _outside(column: array[float], start: int, count: int) -> list[float | None]:
    shown = [value if math.isfinite(value) else None for value in column[start:]]
    return shown + [None] * (count - start - len(shown))
