"""Where records go beside metrics.jsonl and the progress line: each in its own file, all behind one small border.

    record ──▶ metrics.jsonl, progress ──▶ prometheus, tensorboard, wandb, ray   (`telemetry.sinks`)

A sink that cannot start stops the run (`PlanError`); one that breaks later is given up with one warning. The `ray` sink
is in `flowtrain.runtime.ray_metrics`, which alone may import Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.telemetry.sinks.prometheus import PrometheusSink
from flowtrain.telemetry.sinks.tensorboard import TensorBoardSink
from flowtrain.telemetry.sinks.wandb import WandbSink
from flowtrain.telemetry.streams import tell


class Sink(Protocol):
    """Takes the record of every step, in order."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Keeps or sends one record (`Registry.record`); the record stays the caller's."""

    def close(self, in_order: bool) -> None:
        """Writes out what is held back; `in_order`: the run made its last step, or was asked to stop and has saved."""


Opener = Callable[[Config, Path], Sink]

OPENERS: Mapping[str, Opener] = {
    "prometheus": PrometheusSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}
"""Name in `telemetry.sinks` → what opens it for a run in a folder; raises `PlanError` or whatever its library does."""


class Guarded:
    """A sink that the run does not depend on: when it fails it is closed, told of once, and left."""

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], object]) -> None:
        self._name = name
        self._sink: Sink | None = sink
        self._warn = warn

    def write(self, record: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._try(self._sink, lambda sink: sink.write(record))

    def close(self, in_order: bool) -> None:
        if self._sink is not None:
            self._try(self._sink, lambda sink: sink.close(in_order))
            self._sink = None

    def _try(self, sink: Sink, call: Callable[[Sink], None]) -> None:
        try:
            call(sink)
        except Exception as error:
            self._sink = None
            self._warn(f"warning: telemetry sink {self._name} broke and is given up ({_text(error)})")
            with suppress(Exception):
                sink.close(False)


@dataclass
class Opened:
    """The sinks of a run; `in_order` is set once it has come to its end as it should, and told them at their close."""

    sinks: tuple[Sink, ...]
    in_order: bool = False


@contextmanager
def open_sinks(
    config: Config, run_dir: Path, openers: Mapping[str, Opener], warn: Callable[[str], object] = tell
) -> Iterator[Opened]:
    """The sinks that `telemetry.sinks` names, closed at the end. Raises `PlanError` for one that cannot start."""
    guarded: list[Guarded] = []
    opened = Opened(())
    try:
        for name in config.telemetry.sinks:
            try:
                guarded.append(Guarded(name, openers[name](config, run_dir), warn))
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"telemetry sink {name} cannot start: {_text(error)}; repair that, or change telemetry.sinks"
                ) from error
        opened.sinks = tuple(guarded)
        yield opened
    finally:
        for sink in guarded:
            sink.close(opened.in_order)


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
