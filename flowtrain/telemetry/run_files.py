"""The files that a run appends to: metrics.jsonl, samples.jsonl and decisions.jsonl, and summary.json (contract C11).

    record ──▶ one JSON line, flushed ──▶ file
    resume at N ──▶ records of steps after N are dropped, the rest is kept, by one atomic rewrite

A file that cannot be opened stops the run; one that breaks later is given up with one warning, and training goes on.
Numbers that are not finite are written as null, so that every line is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.streams import tell

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
DECISIONS_FILE = "decisions.jsonl"
SUMMARY_FILE = "summary.json"
POOL_FILE = "pool.csv"


def finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


class JsonLines:
    """One append-only file of JSON objects, each with its `step`."""

    def __init__(self, path: Path, resume_step: int | None, warn: Callable[[str], object] = tell) -> None:
        self.path = path
        self._warn = warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                path.unlink(missing_ok=True)
            else:
                _drop_after(path, resume_step)
            self._file: TextIO | None = path.open("a", encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write {path}: {error.strerror}; change run.dir or make room there") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        line = json.dumps(finite(dict(record)), allow_nan=False) + "\n"
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._warn(f"warning: cannot write {self.path}: {error.strerror}; nothing more is written to it")
            self._abandon()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._warn(f"warning: cannot write the end of {self.path}: {error.strerror}")
            self._file = None

    def _abandon(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            # What is buffered is what could not be written: the warning has said so.
            return


def _drop_after(path: Path, step: int) -> None:
    """Keep the records up to `step`; a line torn by a kill can only be the last one."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    kept = []
    for number, stored in enumerate(lines, start=1):
        if not stored:
            continue
        try:
            line = stored.decode()
            record_step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):
                continue
            raise ConfigError(f"{path}:{number} is not a record with a step: repair or remove the file") from error
        if record_step <= step:
            kept.append(line + "\n")
    write_atomic(path, "".join(kept))


class RunFiles:
    """All files of one run; a context manager that closes them.

    `resume_step`: step of the checkpoint that the run goes on from; None: a fresh run, which replaces what is there.
    `metrics` takes one record a step (`StepMetrics.to_record`).
    """

    def __init__(self, run_dir: Path, resume_step: int | None, warn: Callable[[str], object] = tell) -> None:
        self.run_dir = run_dir
        self._warn = warn
        self.metrics = JsonLines(run_dir / METRICS_FILE, resume_step, warn)
        self._samples = JsonLines(run_dir / SAMPLES_FILE, resume_step, warn)
        self._decisions = JsonLines(run_dir / DECISIONS_FILE, resume_step, warn)
        self._pool: TextIO | None = None

    def samples(self, step: int, rank: int, pack: int, ids: Sequence[str]) -> None:
        """The rows that one pack trained; `pack` is its slot."""
        self._samples.write({"step": step, "rank": rank, "pack": pack, "ids": list(ids)})

    def decision(self, step: int, kind: str, **fields: Any) -> None:
        """One decision that holds from `step` on (contract C1)."""
        self._decisions.write({"step": step, "kind": kind, **fields})

    def pool_event(self, event: str, address: int, num_bytes: int) -> None:
        """One line of pool.csv (`debug.pool_journal`); the file is opened by the first."""
        if self._pool is None:
            self._pool = (self.run_dir / POOL_FILE).open("w", encoding="utf-8")
            self._pool.write("event,address,bytes\n")
        self._pool.write(f"{event},{address},{num_bytes}\n")

    def summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json at once and whole; warns when that fails."""
        path = self.run_dir / SUMMARY_FILE
        try:
            write_atomic(path, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
        except OSError as error:
            self._warn(f"warning: cannot write {path}: {error.strerror}")

    def close(self) -> None:
        """Idempotent."""
        for file in (self.metrics, self._samples, self._decisions):
            file.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
