"""What a metric is: its name, unit and kind, and how many values become one; the table of them is in `metrics`.

    measurements by rank ──Registry.record──▶ one value a metric and step ──Tally──▶ one value a metric and run

Values are reduced late: a mean is kept as a sum and a weight until somebody reads it, so that means of means never
arise. Rates over time are weighted by the step's seconds: the mean of a run's tokens a second is its tokens by its
seconds, and the mean of its MFU is its FLOPs by what its devices could have done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LABEL = re.compile(r"[A-Z]{2,}")


class Kind(StrEnum):
    """COUNTER: an amount of one step, which adds up. GAUGE: a state or rate. FACT: text or flag, in the record only."""

    COUNTER = "counter"
    GAUGE = "gauge"
    FACT = "fact"


class Reduce(StrEnum):
    """How several values become one: those of ranks in a step, those of steps in a run."""

    SUM = "sum"
    MEAN = "mean"
    TIME_MEAN = "mean by seconds"
    MAX = "max"
    IMBALANCE = "max / mean"
    LAST = "last"


@dataclass(slots=True)
class Tally:
    """Values on their way to one."""

    total: float = 0
    weight: float = 0
    most: float | None = None
    last: float | None = None

    def add(self, value: float, weight: float = 1) -> None:
        self.total += value * weight
        self.weight += weight
        self.most = value if self.most is None else max(self.most, value)
        self.last = value

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def value(self, how: Reduce) -> float | None:
        """None when nothing was added, or where a share of nothing is asked for."""
        match how:
            case Reduce.SUM:
                return self.total if self.weight else None
            case Reduce.MEAN | Reduce.TIME_MEAN:
                return self.mean
            case Reduce.MAX:
                return self.most
            case Reduce.IMBALANCE:
                return self.most / self.mean if self.most is not None and self.mean else None
            case Reduce.LAST:
                return self.last


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Attributes:
        name: in metrics.jsonl; capitals stand for what it is split by, as `MODULE` in `lr/MODULE`.
        kind, unit: `unit` is empty for pure numbers.
        ranks: how values of the ranks of a side become one; None where the controller knows the value itself.
        steps: how values of steps become the run's; None where they do not.
        meaning: of the docs and of sinks that show one.
        console: how the progress line shows it, such as `MFU {:.1f}%`; None: not at all.
        optional: steps may be without it.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    ranks: Reduce | None = None
    steps: Reduce | None = None
    console: str | None = None
    optional: bool = False

    @property
    def label(self) -> str | None:
        """What it is split by, in lower case."""
        found = LABEL.search(self.name)
        return found[0].lower() if found else None

    def of(self, value: str) -> str:
        """The name of one part of a split metric."""
        return LABEL.sub(lambda _: value, self.name, count=1)

    def part(self, name: str) -> str | None:
        """What `of` was called with to make this name; None where it did not make it."""
        if self.label is None:
            return None
        before, after = LABEL.split(self.name, maxsplit=1)
        inside = name.startswith(before) and name.endswith(after)
        return name[len(before) : len(name) - len(after)] or None if inside else None

    def reduced(self, measured: Any) -> Any:
        """`measured`: the value, or values by rank where `ranks` says how they become one; None is not known."""
        if self.ranks is None or not isinstance(measured, Mapping):
            return measured
        tally = Tally()
        for value in measured.values():
            tally.add(value)
        return tally.value(self.ranks)


class Registry:
    """Metrics in the order in which records and docs show them."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._parts: dict[str, tuple[Metric, str | None]] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())

    def add(self, name: str, kind: Kind, unit: str, meaning: str, **more: Any) -> Metric:
        """Declare a metric; its name must be new."""
        assert name not in self._metrics, f"{name} is declared twice"
        metric = self._metrics[name] = Metric(name, kind, unit, meaning, **more)
        if metric.label is None:
            self._parts[name] = metric, None
        return metric

    def find(self, name: str) -> tuple[Metric, str | None]:
        """The metric of a name in a record, and which part of it; KeyError for a name that nobody declared."""
        if name not in self._parts:
            found = ((metric, metric.part(name)) for metric in self)
            known = next(((metric, part) for metric, part in found if part), None)
            if known is None:
                raise KeyError(f"no metric is called {name}: declare it in flowtrain/telemetry/metrics.py")
            self._parts[name] = known
        return self._parts[name]

    def record(self, measured: Mapping[Metric, Any]) -> dict[str, Any]:
        """A step's record, in the order of the table. Every metric that is not optional must have been measured."""
        missing = [metric.name for metric in self if metric not in measured and not metric.optional]
        assert not missing, f"a record without {', '.join(missing)}"
        record: dict[str, Any] = {}
        for metric in self:
            if metric not in measured:
                continue
            value = measured[metric]
            if metric.label is None:
                record[metric.name] = metric.reduced(value)
            else:
                record |= {metric.of(part): metric.reduced(inner) for part, inner in value.items()}
        return record
