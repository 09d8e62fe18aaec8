"""Which cost model a step is composed by: the fit's, from a step on, or a log's, whatever is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.errors import ConfigError
from flowtrain.messages import PackTrained, UnitEncoded, UnitsReturned
from flowtrain.packing import CostModel
from flowtrain.packing.fit import FEWEST, WARM_UP
from flowtrain.runtime.decisions import REFIT_STEPS, Choice, Costs, ReplayLog
from flowtrain.types import EncodeUnit, ImageMeta, Pack, Phase, SampleMeta, SkippedRow, Step, UnitId

BASE = CostModel.from_coefficients(token=5e6, token_pair=3e3, patch=1e6, patch_pair=1e3)
ENOUGH = FEWEST + WARM_UP


def step_of(index: int, num_packs: int = 8, phase: Phase = Phase.TRAIN) -> Step:
    """Packs of one rank, of different sizes, each with one unit."""
    slots = []
    for slot in range(num_packs):
        images = (ImageMeta(8, 8, 4, 10 + slot, (10 + slot) ** 2),)
        samples = tuple(
            SampleMeta.of(n, n, str(n), 20 + 10 * slot + index % 3, 4, 1, images) for n in range(1 + slot % 3)
        )
        unit = EncodeUnit(UnitId(phase, index, slot, 0, 0), samples, 10, 64, 0)
        slots.append((Pack(slot, 0, samples, (unit,), BASE.pack_cost(samples), BASE.encode_cost(samples)),))
    return Step(phase, index, tuple(slots), 1, 0, 0)


def carry_out(
    costs: Costs, step: Step, token: float, pack: float = 0.0, bad: dict[int, SkippedRow] | None = None
) -> None:
    costs.composed(step)
    for p in step.packs:
        seconds = token * p.tokens + pack
        costs.trained(step, PackTrained(step.phase, step.index, p.slot, 0, 1.0, 1, seconds, 0.0), bad or {})
        patches = sum(unit.patches for unit in p.units)
        ids = tuple(unit.id for unit in p.units)
        costs.encoded(step, UnitEncoded(ids[0], 0, (), tuple((bad or {}).values()), 1e-4 * patches, 0.0))
        costs.returned(step, UnitsReturned(ids, 0, 2e-4 * patches, 0.0))


def run(costs: Costs, steps: range, token: float, pack: float = 0.0) -> list[Choice]:
    chosen = []
    for index in steps:
        chosen.append(costs.of(index))
        carry_out(costs, step_of(index), token, pack)
    return chosen


def test_without_a_fit_nothing_measured_counts() -> None:
    chosen = run(Costs(BASE, 0), range(1, 40), 1e-3)
    assert set(chosen) == {Choice(BASE, "model")}


def test_a_fit_is_looked_for_at_steps_and_holds_from_one_on() -> None:
    costs = Costs(BASE, 0, fits=True)
    chosen = run(costs, range(1, 3 * REFIT_STEPS), 1e-3)
    first = next(number for number, choice in enumerate(chosen, start=1) if choice.source == "fitted")
    assert first == REFIT_STEPS
    assert all(choice.source == "fitted" for choice in chosen[first - 1 :])
    assert chosen[-1].cost.coefficients()["token"] == pytest.approx(1e-3, rel=0.02)
    assert len(set(chosen)) == 2, "a fit that tells nothing new is not another decision"


def test_a_change_of_the_machine_is_another_decision() -> None:
    costs = Costs(BASE, 0, fits=True)
    run(costs, range(1, 2 * REFIT_STEPS), 1e-3)
    later = run(costs, range(2 * REFIT_STEPS, 60 * REFIT_STEPS), 3e-3)
    assert later[-1].cost.coefficients()["token"] == pytest.approx(3e-3, rel=0.05)


def test_a_choice_once_made_stays() -> None:
    costs = Costs(BASE, 0, fits=True)
    before = costs.of(REFIT_STEPS + 1)
    run(costs, range(1, REFIT_STEPS + 1), 1e-3)
    assert costs.of(REFIT_STEPS + 1) == before


def test_each_choice_is_logged_once() -> None:
    costs = Costs(BASE, 0, fits=True)
    logged = []
    for index in range(1, 3 * REFIT_STEPS):
        costs.of(index)
        if (choice := costs.to_log(index)) is not None:
            logged.append((index, choice.source))
        carry_out(costs, step_of(index), 1e-3)
    assert logged == [(1, "model"), (REFIT_STEPS, "fitted")]


def test_packs_with_bad_rows_and_evaluation_are_left_out() -> None:
    costs = Costs(BASE, 0, fits=True)
    row = SkippedRow(0, 0, "0", "image-undecodable", "")
    for index in range(1, 40):
        carry_out(costs, step_of(index), 1e-3, bad={0: row})
        costs.trained(step_of(index, phase=Phase.EVAL), PackTrained(Phase.EVAL, index, 0, 0, 1.0, 1, 9.0, 0.0), {})
    assert costs.of(40).source == "model"
    assert costs.state(40)["fit"]["pack"] == []


def test_a_resumed_fit_goes_on() -> None:
    costs = Costs(BASE, 0, fits=True)
    run(costs, range(1, 2 * REFIT_STEPS), 1e-3)
    last = 2 * REFIT_STEPS - 1
    state = json.loads(json.dumps(costs.state(last)))
    resumed = Costs(BASE, last, fits=True)
    resumed.load_state(state)
    assert resumed.of(last + 1) == costs.of(last)
    assert resumed.state(last)["fit"] == costs.state(last)["fit"]
    by_model = Costs(BASE, last)
    by_model.load_state(state)
    assert by_model.of(last + 1) == Choice(BASE, "model"), "a run by the model takes nothing measured"


# --- replay -----------------------------------------------------------------------------------------------------------


def write_log(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


COMPOSITION = {"step": 1, "kind": "composition", "seed": 3, "max_tokens": 64}


def cost_entry(step: int, token: float) -> dict[str, Any]:
    cost = CostModel.from_coefficients(token=token)
    return {"step": step, "kind": "cost", **Choice(cost, "fitted").to_dict(), "error": 0.1}


def test_a_log_is_repeated_whatever_is_measured(tmp_path: Path) -> None:
    file = write_log(tmp_path / "log", COMPOSITION, cost_entry(1, 1.0), cost_entry(5, 2.0), {"step": 9, "kind": "stop"})
    costs = Costs(BASE, 0, fits=True, log=ReplayLog.read(file))
    tokens = [choice.cost.coefficients()["token"] for choice in run(costs, range(1, 30), 1e-3)]
    assert tokens == [1.0] * 4 + [2.0] * 25


def test_a_run_repeats_its_own_log(tmp_path: Path) -> None:
    costs = Costs(BASE, 0, fits=True)
    chosen, entries = [], [COMPOSITION]
    for index in range(1, 3 * REFIT_STEPS):
        chosen.append(costs.of(index))
        if (choice := costs.to_log(index)) is not None:
            entries.append({"step": index, "kind": "cost", **choice.to_dict()})
        carry_out(costs, step_of(index), 1e-3, pack=index * 1e-3)
    again = Costs(BASE, 0, log=ReplayLog.read(write_log(tmp_path / "log", *entries)))
    assert [again.of(index) for index in range(1, 3 * REFIT_STEPS)] == chosen


def test_other_rules_or_rows_are_refused_by_name(tmp_path: Path) -> None:
    log = ReplayLog.read(write_log(tmp_path / "log", COMPOSITION, cost_entry(1, 1.0)))
    log.check(1, 10, {"seed": 3, "max_tokens": 64})
    with pytest.raises(ConfigError, match=r"from its step 1 it differs in max_tokens \(64 there, 80 here\)"):
        log.check(1, 10, {"seed": 3, "max_tokens": 80})
    with pytest.raises(ConfigError, match=r"num_rows \(None there, 5 here\)"):
        log.check(1, 10, {"seed": 3, "max_tokens": 64, "num_rows": 5})


def test_rules_that_change_on_the_way_are_refused_where_they_matter(tmp_path: Path) -> None:
    changed = {**COMPOSITION, "step": 7, "max_tokens": 32}
    log = ReplayLog.read(write_log(tmp_path / "log", COMPOSITION, cost_entry(1, 1.0), changed))
    log.check(1, 6, {"seed": 3, "max_tokens": 64})
    log.check(8, 20, {"seed": 3, "max_tokens": 32})
    with pytest.raises(ConfigError, match="from its step 7"):
        log.check(1, 7, {"seed": 3, "max_tokens": 64})


def test_a_torn_last_line_is_passed_over_and_others_are_not(tmp_path: Path) -> None:
    file = write_log(tmp_path / "log", COMPOSITION, cost_entry(1, 1.0))
    file.write_text(file.read_text() + '{"step": 4, "kind": "co')
    assert len(ReplayLog.read(file).entries) == 2
    file.write_text("nonsense\n" + file.read_text())
    with pytest.raises(ConfigError, match=":1 is no decision"):
        ReplayLog.read(file)


def test_what_is_no_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ReplayLog.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no cost"):
        ReplayLog.read(write_log(tmp_path / "log", COMPOSITION))
    with pytest.raises(ConfigError, match=":2 is no decision"):
        ReplayLog.read(write_log(tmp_path / "log", COMPOSITION, {"step": 1, "kind": "cost", "token": 1}, COMPOSITION))
