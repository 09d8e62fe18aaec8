"""The records of metrics.jsonl in their order, and, as sentences, what of the file is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain.telemetry.dashboard.tail import MOST_LINE_BYTES, Tail
from flowtrain.telemetry.run_files import METRICS_FILE


class Records:
    """Of the run in `root`.

    Attributes:
        tail: where reading stands.
    """

    def __init__(self, root: Path) -> None:
        self.tail = Tail(root / METRICS_FILE, root)
        self._num_lines = self._num_bad = self._step = 0
        self._first_bad = ""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began anew, and the new records: mappings with a `step` above that of the one before."""
        anew, lines = self.tail.read()
        if anew:
            self._num_lines = self._num_bad = self._step = 0
        found = []
        for line in lines:
            self._num_lines += 1
            record, why = _record(line, self._step)
            if record is not None:
                self._step = record["step"]
                found.append(record)
            else:
                self._first_bad = self._first_bad if self._num_bad else f"line {self._num_lines}, {why}"
                self._num_bad += 1
        return anew, found

    def problems(self, live: bool) -> Iterator[str]:
        """What cannot be shown, and why. `live`: the run goes on, so that a line without an end is being written."""
        tail = self.tail
        if tail.problem is not None:
            yield f"{METRICS_FILE} cannot be read: {tail.problem}"
        elif not live and not tail.size:
            yield f"There is no record in {METRICS_FILE}: the run ended before its first step, or the file was moved"
        if self._num_bad:
            lines = "1 line" if self._num_bad == 1 else f"{self._num_bad} lines"
            yield f"{lines} of {METRICS_FILE} cannot be shown: {self._first_bad}"
        if tail.passed_over:
            yield f"{METRICS_FILE} has a line of more than {MOST_LINE_BYTES >> 20} MiB, which cannot be shown"
        if tail.torn_bytes and not live:
            yield f"The last line of {METRICS_FILE} is torn: the run ended, or its disk was full, while it was written"


def _record(line: bytes, before: int) -> tuple[dict[str, Any] | None, str]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None, "is not UTF-8"
    except RecursionError:
        return None, "is nested too deep"
    except ValueError:
        return None, "is no JSON"
    if not isinstance(record, dict):
        return None, "is no JSON object"
    step = record.get("step")
    if type(step) is not int or step < 1:
        return None, "has no step"
    if step <= before:
        return None, f"goes back from step {before} to {step}"
    return record, ""
