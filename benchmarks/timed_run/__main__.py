"""One real run: how long each order took, and what it held.

    python -m benchmarks.timed_run CONFIG OUT.json

OUT has the features of every encode, backward and pack with its seconds (`flowtrain.packing.fit`), the seconds of
reductions and updates, and the seconds between the stages where all are one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowtrain.allocator import local_inventory, make_plan
from flowtrain.config.loading import load_config
from flowtrain.messages import BackwardOrder, EncodeOrder, PackOrder
from flowtrain.packing import CostModel
from flowtrain.packing.fit import pack_features
from flowtrain.runtime.executor import Answer, Executor
from flowtrain.runtime.nodes import listen_on_loopback
from flowtrain.runtime.run import execute, make_executor
from flowtrain.runtime.signals import StopRequest
from flowtrain.shapes import read_shape
from flowtrain.types import Role, SampleMeta, UnitId

Rank = tuple[Role, int]


def unit_features(units: Sequence[Sequence[SampleMeta]]) -> tuple[int, int, int]:
    """Σ patches, Σ pairs, calls."""
    samples = [sample for unit in units for sample in unit]
    return sum(s.patches for s in samples), sum(s.patch_pairs for s in samples), len(units)


@dataclass
class Book:
    """An executor that passes everything on and writes down how long it took.

    An order that does not say its seconds took those since it was sent, or since the rank's last answer.
    """

    inner: Executor
    cost: CostModel
    calls: dict[str, list[tuple[Any, float]]] = field(default_factory=lambda: defaultdict(list))
    busy: float = 0.0
    first: float | None = None
    last: float = 0.0
    _asked: dict[Rank, list[tuple[str, Any, float]]] = field(default_factory=lambda: defaultdict(list))
    _answered: dict[Rank, float] = field(default_factory=lambda: defaultdict(float))
    _units: dict[UnitId, Sequence[SampleMeta]] = field(default_factory=dict)

    def submit(self, role: Role, rank: int, method: str, *args: Any, payloads: Sequence[Any] = ()) -> None:
        self._asked[role, rank].append((method, args[0] if args else None, time.monotonic()))
        self.inner.submit(role, rank, method, *args, payloads=payloads)

    def next(self, timeout: float) -> Answer | None:
        answer = self.inner.next(timeout)
        if answer is None or answer.error is not None:
            return answer
        method, order, sent = self._asked[answer.role, answer.rank].pop(0)
        now, key = time.monotonic(), (answer.role, answer.rank)
        since = max(sent, self._answered[key])
        self._answered[key] = now
        match order:
            case EncodeOrder(unit=unit):
                self._units[unit.id] = unit.samples
                self._note("encode", unit_features([unit.samples]), answer.value.seconds)
            case BackwardOrder(units=units):
                held = [self._units[unit] for unit in units]
                self._note("backward", unit_features(held), answer.value.seconds)
            case PackOrder(pack=pack):
                self._note("pack", pack_features(self.cost, pack.samples), answer.value.seconds)
            case _ if method in ("reduce", "update"):
                self._note(f"{method} {answer.role}", None, now - since)
        return answer

    def _note(self, kind: str, features: Any, seconds: float) -> None:
        self.calls[kind].append((features, seconds))
        now = time.monotonic()
        if self.first is None:
            self.first = now
        else:
            self.busy += seconds
        self.last = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def main(config_file: Path, out: Path) -> None:
    config = load_config(config_file).config
    shape = read_shape(config.model.path)
    stop = StopRequest(60.0)
    listen_on_loopback()
    with ExitStack() as stack:
        plan = make_plan(config, shape, local_inventory())
        cost = CostModel.from_shape(shape, config.frozen, config.cut)
        book = Book(make_executor(config, plan, None, stop, stack), cost)
        execute(config, config.run.dir, None, stop, executor=book)
        between = max(0.0, book.last - (book.first or 0.0) - book.busy)
        out.write_text(json.dumps({"calls": book.calls, "between_seconds": between}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
