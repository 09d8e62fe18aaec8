"""One run as the page sees it: what has been read so far, and whether it changed.

poll() ──▶ a bounded lump of what is new ──▶ `version` moves on
about(), columns(), timeline() ──▶ JSON of what is known now
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError
from flowtrain.telemetry.dashboard.charts import described, page_charts
from flowtrain.telemetry.dashboard.foreign import mapping, number, parsed, sequence, single, text
from flowtrain.telemetry.dashboard.history import History
from flowtrain.telemetry.dashboard.records import Records
from flowtrain.telemetry.dashboard.state import SmallFiles, phase_of, plan_of, total_steps
from flowtrain.telemetry.dashboard.tail import Tail
from flowtrain.telemetry.dashboard.tracks import Tracks
from flowtrain.telemetry.metrics import PEAK_SOURCE, ROWS, ROWS_SKIPPED, ROWS_SKIPPED_OF, STEP_SECONDS
from flowtrain.telemetry.run_files import DECISIONS_FILE, METRICS_FILE, SUMMARY_FILE, finite

PLACEMENT_FILE = "placement.json"
HELD_DECISIONS = 100
MOST_PROBLEMS = 8
PACE_STEPS = 20
"""Steps whose mean time tells how long the rest takes."""

MARKS = ("config.yaml", METRICS_FILE, DECISIONS_FILE, "checkpoints")


class RunView:
    """One folder of a run; not thread-safe. ConfigError for a folder that no run wrote."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir.resolve()
        self.name = self.root.name
        if not self.root.is_dir():
            raise ConfigError(f"{run_dir}: there is no such folder; give the run.dir of a run")
        if not any((self.root / mark).exists() for mark in MARKS):
            raise ConfigError(f"{run_dir} is not the folder of a run: it holds none of {', '.join(MARKS)}")
        self.history = History()
        self.tracks = Tracks(self.root)
        self.version = 0
        self._records = Records(self.root)
        self._log = Tail(self.root / DECISIONS_FILE, self.root)
        self._files = SmallFiles(self.root)
        self._decisions: deque[dict[str, Any]] = deque(maxlen=HELD_DECISIONS)
        self._composition: dict[str, Any] = {}
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._totals = {ROWS.name: 0, ROWS_SKIPPED.name: 0}
        self._reasons: Counter[str] = Counter()
        self._state: dict[str, Any] = {}

    def poll(self) -> bool:
        """Read some of what is new; whether there is more."""
        changed = self._read_records()
        changed = self._read_decisions() or changed
        before = self.tracks.version
        more = self.tracks.poll() or not self._records.tail.at_end or not self._log.at_end
        state = self._stand()
        changed = changed or self.tracks.version != before or state != self._state
        self._state = state
        self.version += changed
        return more

    def _read_records(self) -> bool:
        anew, records = self._records.read()
        if anew:
            self.history.restart()
            self._pace.clear()
            self._totals = dict.fromkeys(self._totals, 0)
            self._reasons.clear()
        for record in records:
            self.history.add(record)
            if seconds := number(record.get(STEP_SECONDS.name)):
                self._pace.append(seconds)
            for name in self._totals:
                self._totals[name] += number(record.get(name))
            if record.get(ROWS_SKIPPED.name):
                reasons = ((ROWS_SKIPPED_OF.part(name), value) for name, value in record.items())
                self._reasons.update({reason: value for reason, value in reasons if reason and isinstance(value, int)})
        return anew or bool(records)

    def _read_decisions(self) -> bool:
        anew, lines = self._log.read()
        if anew:
            self._decisions.clear()
            self._composition = {}
        for line in lines:
            entry = parsed(line)
            if isinstance(entry, dict):
                if entry.get("kind") == "composition":
                    self._composition = entry
                self._decisions.append(entry)
        return anew or bool(lines)

    def _stand(self) -> dict[str, Any]:
        step = self.history.step
        total = total_steps(mapping(self._files.read("config.yaml")), self._composition)
        state = phase_of(self._files, step)
        left = None
        if state["phase"] == "running" and total is not None and self._pace:
            left = max(0, total - step) * sum(self._pace) / len(self._pace)
        tail, live = self._records.tail, state["phase"] in ("starting", "running")
        for name in (SUMMARY_FILE, "plan.yaml", PLACEMENT_FILE):
            self._files.read(name)  # so that what is wrong with them is told
        problems = [*self._records.problems(live), *self._log_problems()]
        problems += [f"{name} cannot be read: {why}" for name, why in self._files.problems.items()]
        return {
            **state,
            "step": step,
            "total": total,
            "left": left,
            "read": tail.offset / tail.size if tail.size and not tail.at_end else 1,
            "problems": [one[:300] for one in problems[:MOST_PROBLEMS]],
        }

    def _log_problems(self) -> Iterator[str]:
        if self._log.problem is not None:
            yield f"{DECISIONS_FILE} cannot be read: {self._log.problem}"
        if self.tracks.problem is not None:
            yield self.tracks.problem

    # --- what the page asks for ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is told as it changes: phase, step, and which history there is to fetch."""
        return {
            **self._state,
            "version": self.version,
            "generation": self.history.generation,
            "buckets": len(self.history),
            "names": len(self.history.names),
            "timeline": self.tracks.version,
        }

    def about(self) -> dict[str, Any]:
        """Charts, metrics, plan, rows and decisions."""
        names, config = self.history.names, mapping(self._files.read("config.yaml"))
        summary = mapping(self._files.read(SUMMARY_FILE))
        skipped = mapping(mapping(summary.get("rows")).get("skipped"))
        if not summary:  # ids are written at the run's end
            skipped = {reason: {"count": count} for reason, count in self._reasons.most_common()}
        return {
            "name": self.name,
            "path": str(self.root),
            "state": self.state(),
            "charts": page_charts(names),
            "metrics": [described(name) for name in names],
            "facts": {
                "mode": single(config.get("mode")),
                "model": text(mapping(config.get("model")).get("path")),
                "peak": single(self.history.latest.get(PEAK_SOURCE.name)),
                "written": time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(self._files.changed_at(METRICS_FILE))),
            },
            "traced": mapping(config.get("run")).get("trace") is True,
            "plan": plan_of(mapping(self._files.read("plan.yaml")), self._files.read(PLACEMENT_FILE)),
            "rows": {
                "trained": self._totals[ROWS.name],
                "skipped": self._totals[ROWS_SKIPPED.name],
                "reasons": [
                    {
                        "reason": str(reason),
                        "count": number(mapping(found).get("count")),
                        "ids": [text(row) for row in sequence(mapping(found).get("ids"))[:20]],
                    }
                    for reason, found in skipped.items()
                ],
                "ended": bool(summary),
            },
            "decisions": [_told(entry) for entry in reversed(self._decisions)],
        }

    def columns(self, names: list[str], start: int, generation: int) -> dict[str, Any]:
        """History of these metrics; from the beginning where the page's is of another generation."""
        start = start if generation == self.history.generation else 0
        latest = {name: self.history.latest[name] for name in names if name in self.history.latest}
        return {**self.history.columns(names, start), "latest": finite(latest), "step": self.history.step}

    def timeline(self, num_steps: int) -> dict[str, Any]:
        """The newest steps of a traced run; `window` is None when there is none yet."""
        return {"version": self.tracks.version, "window": self.tracks.newest(num_steps)}


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in entry.items() if name not in ("step", "kind")}
    try:
        content = json.dumps(finite(fields), separators=(", ", ": "))
    except RecursionError:
        content = "nested too deep to be shown"
    shown = content[:400] + "…" * (len(content) > 400)
    return {"step": single(entry.get("step")), "kind": text(entry.get("kind")), "text": shown}
