"""Records of the modes, by hand: rounds put together, ratios round by round, the page made from what is committed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.modes.__main__ import MODES, compared
from benchmarks.modes.make import JOBS, of_depth
from benchmarks.modes.page import PAGE, filled, records
from benchmarks.modes.record import as_record, by_other, checks, joined, load_ratio, of_limit
from benchmarks.peers.__main__ import summary
from benchmarks.peers.settings import settings

MACHINE = {"commit": "abc", "hardware": {"cores": 2}, "versions": {}}


def bench(
    flow: float, other: float, bound: float, schedule: float = 0.99, telemetry: float = 0.001, load: float = 0.96
) -> dict[str, Any]:
    """What `flowtrain bench` writes of one round."""
    figures = {"mfu/gap_to_llm_only(%)": 1.0, "flow/starvation(s)": 0.02}
    return {
        "settings": {"config": "jobs/even.yaml", "steps": 6, "warmup": 2, "step_rows": 48},
        "runs": {"flow": [{"samples/s": flow, **figures}], "disaggregated": [{"samples/s": other, **figures}]},
        "limits": {"split bound": bound},
        "schedule / measured": {"disaggregated": {"median": schedule, "spread": 0.0}},
        "telemetry": {"flow": telemetry, "disaggregated": None},
        "losses": {},
        "loads": {"producer": load, "consumer": 1.0},
    }


def test_rounds_of_two_calls_are_one_measurement() -> None:
    """The machine is half as fast in the second one; ratios do not change."""
    first, second = (as_record("even-frozen", bench(20 * f, 16 * f, 21 * f), MACHINE) for f in (1.0, 0.5))
    record = joined(first, second)
    assert [run["samples/s"] for run in record["runs"]["flow"]] == [20, 10]
    assert by_other(record)["disaggregated"].median == pytest.approx(1.25)
    assert of_limit(record, "split bound").median == pytest.approx(20 / 21)
    assert load_ratio(record) == pytest.approx(0.96)
    with pytest.raises(AssertionError):
        joined(first, as_record("even-trainable", bench(1, 1, 1), MACHINE))


def test_limits_are_those_of_the_job() -> None:
    kept = {check.name: check for check in checks(as_record("even-frozen", bench(20, 16, 21), MACHINE))}
    assert all(check.ok for check in kept.values())
    assert kept["starvation (% of the step)"].value == pytest.approx(100 * 0.02 * 20 / 48, abs=1e-3)
    slow = checks(as_record("even-frozen", bench(16, 16, 21, schedule=0.9, telemetry=0.02), MACHINE))
    assert [check.name for check in slow if not check.ok] == [
        "flow / split bound",
        "flow / disaggregated",
        "disaggregated: step off its schedule",
        "telemetry (% of the run)",
    ]
    trainable = {check.name: check.limit for check in checks(as_record("even-trainable", bench(20, 16, 21), MACHINE))}
    assert (trainable["flow / split bound"], trainable["flow / disaggregated"]) == (0.85, 1.0)
    assert "flow / disaggregated" not in {c.name for c in checks(as_record("uneven-frozen", bench(1, 1, 1), MACHINE))}
    uneven = checks(as_record("even-frozen", bench(20, 16, 21, load=0.93), MACHINE))
    assert [check.name for check in uneven if not check.ok] == ["loads: off from equal"]
    fast = checks(as_record("even-frozen", bench(20, 16, 21, schedule=1.1), MACHINE))
    assert [check.name for check in fast if not check.ok] == ["disaggregated: step off its schedule"]


def test_the_allocator_takes_about_the_best_of_uneven_loads() -> None:
    made = bench(20, 16, 21)
    made["runs"]["auto"] = [{"samples/s": 19.5}]
    found = {check.name: check for check in checks(as_record("uneven-frozen", made, MACHINE))}
    best = found["auto / best of the others"]
    assert (best.value, best.ok) == (pytest.approx(0.975), False)
    assert {job.loads for job in JOBS.values()} == set(MODES)


def test_records_kept_are_what_a_quick_round_is_compared_with() -> None:
    of_modes, _ = records()
    assert of_modes
    for record in of_modes.values():
        assert record["settings"]["vision_layers"] > 0
        assert all(check.ok for check in compared(record, record, tolerance=0.1))


def test_every_peer_trains_whole_steps_on_all_cores() -> None:
    chosen = settings(cores=2, step_rows=48, full=True)
    assert len({one.name for one in chosen}) == len(chosen)
    assert {(one.trainer, one.processes) for one in chosen} == {("trainer", 1), ("trainer", 2), ("sft", 1), ("sft", 2)}
    assert all(48 % (one.processes * one.rows_per_forward) == 0 for one in chosen)
    assert set(settings(2, 48, full=False)) < set(chosen)


def test_the_page_is_made_from_the_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run python -m benchmarks.modes.page"
    assert all(f"`{job}`" in page for job in JOBS)


def test_peers_are_told_with_the_mfu_that_the_limit_takes() -> None:
    runs = {"flow": [18.0, 20.0, 22.0], "one_process": [15.0], "slow": [4.0, 9.0], "fast": [12.5]}
    found = summary(runs, {"flow": [48.0, 40.0, 50.0], "one_process": [70.0]})
    assert (found["best mode"], found["best peer"], found["best mode / best peer"]) == ("flow", "fast", 1.6)
    assert found["mfu of the best mode (%)"] == 48.0
    assert found["mfu of the best peer (%)"] == pytest.approx(30.0)
    assert found["mfu that the limit takes (%)"] == pytest.approx(60.0)


@pytest.mark.parametrize("depth", [0.8, 8.0, 8.42, 8.58, 14.3])
def test_a_tower_is_as_deep_as_is_said(depth: float) -> None:
    """Up to the rounding of widths, by the weights of its layers."""
    size = JOBS["even-trainable"].size
    made = of_depth(size, depth)
    whole = (4 + 2 * 3) * size.vision_width**2
    assert made.vision_mlp is not None
    weights = made.vision_layers * (4 * size.vision_width**2 + 2 * size.vision_width * made.vision_mlp)
    assert weights == pytest.approx(depth * whole, abs=0.02 * whole * made.vision_layers)
    assert of_depth(size, 8).vision_mlp == 3 * size.vision_width
