"""The cost model by which each step is composed, and the log that repeats it (pure, contracts C1 and C10).

    times of packs and units ──▶ CostFit ──┐
    a log given by --replay ───────────────┼──▶ Costs.of(step) ──▶ Composer ──▶ Step
    FLOPs of the shape ────────────────────┘           └──▶ decisions.jsonl: {"step": 9, "kind": "cost", …}

| `packing.cost` | a step is composed by |
|---|---|
| `model` | the FLOPs model, always the same |
| `fitted` | the newest fit worth using, looked for every `REFIT_STEPS` steps |
| either, with `--replay` | the log's entry with the latest step that is not later; nothing measured is used |

Invariants: the cost model of a step is chosen once, before the step is composed, and stands in the log from the step on
for which it first holds; so composition is a function of rows, config and log, whatever the times were.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowtrain.errors import ConfigError
from flowtrain.messages import PackTrained, UnitEncoded, UnitsReturned
from flowtrain.packing.cost import CostModel
from flowtrain.packing.fit import CostFit, Fitted
from flowtrain.types import EncodeUnit, Pack, Phase, Step

REFIT_STEPS = 8
"""Steps between two looks at the fit."""

LEAST_CHANGE = 0.02
"""A fit replaces the one in force when it predicts some pack, or its encoding, differently by more than this."""


class Choice(NamedTuple):
    """A cost model and where it is from: `fitted` ones predict seconds."""

    cost: CostModel
    source: Literal["model", "fitted"]

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, **self.cost.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Choice:
        """What `to_dict` gave, in a log or a checkpoint; KeyError, TypeError or ValueError where it is not that."""
        source: Literal["model", "fitted"] = "fitted" if fields["source"] == "fitted" else "model"
        return cls(CostModel.from_dict(fields), source)


class Costs:
    """`base`: the FLOPs model; `fits`: whether measured times may change it; `log`: what to repeat instead."""

    def __init__(self, base: CostModel, first_step: int, fits: bool = False, log: ReplayLog | None = None) -> None:
        self._log = log
        self._fit = CostFit(base) if fits and log is None else None
        self._newest = Choice(base, "model")
        self._chosen: dict[int, Choice] = {}
        self._logged: Choice | None = None
        self._looked = first_step
        self._last: Step | None = None
        self.fitted: Fitted | None = None

    # --- choices ------------------------------------------------------------------------------------------------------

    def of(self, step: int) -> Choice:
        """By which `step` is (to be) composed; once asked for, it stays."""
        if step not in self._chosen:
            if self._log is not None:
                self._newest = self._log.cost_of(step)
            elif self._fit is not None and step - self._looked >= REFIT_STEPS:
                self._looked = step
                self._look(self._fit)
            self._chosen[step] = self._newest
        return self._chosen[step]

    def to_log(self, step: int) -> Choice | None:
        """The choice of a step that is now composed, if the log does not know it yet."""
        choice = self.of(step)
        if choice == self._logged:
            return None
        self._logged = choice
        return choice

    def composed(self, step: Step) -> None:
        """A step of training was composed; it shows what packs look like."""
        self._last = step

    def recorded(self, step: int) -> None:
        """Nobody asks for steps before this one any more."""
        self._chosen = {number: choice for number, choice in self._chosen.items() if number >= step}

    def _look(self, fit: CostFit) -> None:
        fitted = fit.solve()
        if fitted is None or not fitted.trusted or self._last is None:
            return
        if self._newest.source == "model" or _differ(fitted.cost, self._newest.cost, self._last):
            self.fitted = fitted
            self._newest = Choice(fitted.cost, "fitted")

    # --- measured times -----------------------------------------------------------------------------------------------

    def trained(self, step: Step, answer: PackTrained, bad: Mapping[int, Any]) -> None:
        """A pack was trained; `bad`: positions found bad at decode. Such packs and units say nothing of their cost."""
        samples = step.slots[answer.slot][answer.rank].samples
        if self._fit is not None and step.phase is Phase.TRAIN and not any(s.position in bad for s in samples):
            self._fit.trained(answer.rank, samples, answer.seconds)

    def encoded(self, step: Step, answer: UnitEncoded) -> None:
        samples = unit_of(step, answer.unit).samples
        if self._fit is not None and step.phase is Phase.TRAIN and samples and not answer.bad:
            self._fit.encoded(answer.producer, samples, answer.seconds)

    def returned(self, step: Step, answer: UnitsReturned) -> None:
        if self._fit is not None:
            units = [samples for unit in answer.units if (samples := unit_of(step, unit).samples)]
            self._fit.returned(answer.producer, units, answer.seconds)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, Any]:
        """What a run that goes on after `step` needs, JSON-ready."""
        return {"choice": self.of(step).to_dict(), "fit": self._fit.state() if self._fit is not None else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a run without a fit takes nothing from it."""
        if self._fit is not None and state["fit"] is not None:
            self._newest = Choice.from_dict(state["choice"])
            self._fit.load_state(state["fit"])


def unit_of(step: Step, unit: Any) -> EncodeUnit:
    """The encode unit of this id."""
    return next(found for found in step.slots[unit.slot][unit.rank].units if found.id == unit)


def _differ(new: CostModel, old: CostModel, step: Step) -> bool:
    """Whether two models in seconds predict the packs of a step, or their encoding, differently enough to matter."""
    for pack in step.packs:
        costs = [(model.real(model.pack_cost(pack.samples)), _encode_seconds(model, pack)) for model in (new, old)]
        if any(abs(after - before) > LEAST_CHANGE * before for after, before in zip(*costs, strict=True)):
            return True
    return False


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayLog:
    """The entries of a decision log: `entries[kind]`, in the order of their steps.

    >>> ReplayLog.read(Path("runs/emoji/decisions.jsonl")).cost_of(12).source      # doctest: +SKIP
    'fitted'
    """

    path: Path
    entries: Mapping[str, Sequence[Mapping[str, Any]]]

    @classmethod
    def read(cls, path: Path) -> ReplayLog:
        """ConfigError when it cannot be read or holds no composition or cost; a torn last line is left out."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--replay {path} cannot be read: {error}; give the decisions.jsonl of a run") from error
        entries: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                entry["step"], entry["kind"] = int(entry["step"]), str(entry["kind"])
                if entry["kind"] == "cost":
                    Choice.from_dict(entry)
                elif entry["kind"] == "replan":
                    int(entry["producers"])
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    continue
                raise ConfigError(
                    f"--replay {path}:{number} is no decision: give the decisions.jsonl of a run"
                ) from error
            entries[entry["kind"]].append(entry)
        for kind in ("composition", "cost"):
            if kind not in entries:
                raise ConfigError(f"--replay {path} holds no {kind}: give the decisions.jsonl of a run")
        return cls(path, {kind: sorted(of_kind, key=_step_of) for kind, of_kind in entries.items()})

    def cost_of(self, step: int) -> Choice:
        """The cost model that held for `step`."""
        return Choice.from_dict(self._at("cost", step))

    def check(self, first_step: int, last_step: int, composition: Mapping[str, Any]) -> None:
        """ConfigError unless the log was made by the same rules over the same rows; `first_step` counts from 1."""
        ours = json.loads(json.dumps(composition))
        started = self._at("composition", first_step)
        later = [entry for entry in self.entries["composition"] if first_step < entry["step"] <= last_step]
        for entry in (started, *later):
            theirs = {key: value for key, value in entry.items() if key not in ("step", "kind")}
            names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
            if names:
                told = [f"{name} ({theirs.get(name)!r} there, {ours.get(name)!r} here)" for name in names]
                raise ConfigError(
                    f"--replay {self.path} cannot be repeated: from its step {entry['step']} it differs in "
                    f"{', '.join(told)}; use the config, data (fingerprint) and seed of that run"
                )

    def replans(self, first_step: int) -> Sequence[tuple[int, int]]:
        """(step, producers from it on) of each change of the plan that lies ahead."""
        changes = self.entries.get("replan", ())
        return [(e["step"], int(e["producers"])) for e in changes if e["step"] >= first_step]

    def plan_differs(self, first_step: int, plan: Mapping[str, Any]) -> bool:
        """Whether processes or threads were others: then sums may round differently."""
        ours = json.loads(json.dumps(plan))
        return "plan" in self.entries and self._at("plan", first_step).get("plan") != ours

    def _at(self, kind: str, step: int) -> Mapping[str, Any]:
        """The entry that holds for `step`: the last one not later, the first one where all are later."""
        entries = self.entries[kind]
        return entries[max(0, bisect_right(entries, step, key=_step_of) - 1)]


def _step_of(entry: Mapping[str, Any]) -> int:
    return int(entry["step"])


def _encode_seconds(model: CostModel, pack: Pack) -> float:
    """Calls included: what grows with the images may be next to nothing beside them."""
    return model.real(model.encode_cost(pack.samples) + len(pack.units) * model.call)
