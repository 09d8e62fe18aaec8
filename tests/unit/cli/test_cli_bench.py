"""What a benchmark makes of its runs, by hand; and that every variant is a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from traced_run import write_run

from flowtrain.cli.bench import Bench
from flowtrain.cli.bench_page import bench_page
from flowtrain.cli.bench_result import FIGURES, RATE, Spread, limits, measure, ratios, summarize
from flowtrain.cli.bench_runs import Measured, check, configs_of, in_turns
from flowtrain.cli.bench_variants import VARIANTS, overrides_of
from flowtrain.cli.report import read_report
from flowtrain.config.loading import load_config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.losses import Breakdown


def record(seconds: float, rows: int, mfu: float | None, starved: float) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(metric.name for metric in FIGURES)
    return values | {
        "time_metrics/end_to_end(s)": seconds,
        "rows": rows,
        "mfu(%)": mfu,
        "flow/starvation(s)": starved,
    }


def test_figures_of_a_run_are_ratios_of_sums_without_the_warm_up() -> None:
    found = measure([record(100.0, 10, 1.0, 9.0), record(1.0, 10, 40.0, 0.2), record(3.0, 10, 20.0, 0.4)], warmup=1)
    assert found == {RATE: 5.0, "mfu(%)": pytest.approx(25.0), "flow/starvation(s)": pytest.approx(0.3)}


def test_medians_spreads_and_ratios_are_taken_round_by_round() -> None:
    """The machine is half as fast in the last round: the rates say so, the ratios do not."""
    runs = {"flow": [{RATE: 10.0}, {RATE: 11.0}, {RATE: 5.0}], "monolithic": [{RATE: 8.0}, {RATE: 8.8}, {RATE: 4.0}]}
    assert summarize(runs["flow"]) == {RATE: Spread(10.0, 0.6)}
    [(name, ratio)] = ratios(runs, "flow").items()
    assert (name, ratio.median) == ("monolithic", pytest.approx(1.25))
    assert ratio.spread == pytest.approx(0.0)


def test_limits_of_a_run() -> None:
    """A step of 1 s with 10 rows: the producer's modules are busy for 0.4 s, the consumer's for 0.8 s; 5 % waited."""
    shares = {
        "producer": {"wait": 0.5, "encode": 0.4, "decode": 0.1},
        "consumer": {"forward": 0.3, "backward": 0.45, "optimizer": 0.05, "wait": 0.2},
        "controller": {"wait": 1.0},
    }
    breakdown = Breakdown((2,), 1.0, shares, 0.6, {}, {}, 2, (), 0.0)
    found = limits(breakdown, {RATE: 10.0, "mfu/gap_to_llm_only(%)": 5.0})
    assert found["ideal"] == pytest.approx(10 / 0.6)
    assert found["split bound"] == pytest.approx(10 / 0.8) == pytest.approx(found["ideal"] * (0.4 + 0.8) / 2 / 0.8)
    assert found["LLM-only"] == pytest.approx(10 / 0.95)
    fed = {RATE: 6.0, "mfu/gap_to_llm_only(%)": 50.0}
    assert limits(breakdown, {RATE: 10.0}, fed)["LLM-only"] == pytest.approx(12)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_config(name: str, emoji: Path) -> None:
    config = load_config(emoji / "emoji.yaml", (*overrides_of(name, 2), "data.eval=null")).config
    assert config.producers.copies.world_size + config.consumers.copies.world_size == (
        {"monolithic": 4, "monolithic_dynamic": 4}.get(name, 2)
    )
    axes = (config.placement, config.exchange, config.policy, config.packing_policy)
    flow = ("disaggregated", "pool", "flow_matching", "dynamic")
    changed = [ours for ours, theirs in zip(axes, flow, strict=True) if ours != theirs]
    assert (
        changed
        == {
            "flow": [],
            "disaggregated": ["barrier_pipeline", "stage_balanced", "raw_size"],
            "barrier_step": ["barrier_step", "stage_balanced", "raw_size"],
            "monolithic": ["colocated", "uniform", "arrival"],
            "monolithic_dynamic": ["colocated", "uniform"],
            "one_process": ["colocated", "uniform"],
            "auto": [],
            "without_pool": ["barrier_step"],
            "without_allocator": ["uniform"],
            "without_scheduler": ["arrival"],
        }[name]
    )


def test_a_variant_may_have_keys_of_its_own(emoji: Path) -> None:
    config = load_config(emoji / "emoji.yaml", overrides_of("flow+packing.policy=wlb+pool.exchange=barrier_step", 2))
    assert (config.config.packing.policy, config.config.exchange) == ("wlb", "barrier_step")
    for wrong in ("fast", "flow+packing.policy", "+mode=flow"):
        with pytest.raises(ConfigError, match="is not known: give one of flow, disaggregated"):
            overrides_of(wrong, 2)


def test_each_round_begins_with_another_mode() -> None:
    assert list(in_turns(["a", "b", "c"], 4)) == [
        *((1, name) for name in "abc"),
        *((2, name) for name in "bca"),
        *((3, name) for name in "cab"),
        *((4, name) for name in "abc"),
    ]


def test_rounds_that_ended_early_are_compared_as_far_as_both_came() -> None:
    runs = {"flow": [{RATE: 10.0}, {RATE: 12.0}], "monolithic": [{RATE: 8.0}]}
    assert ratios(runs, "flow") == {"monolithic": Spread(1.25, 0.0)}


def test_all_variants_are_loaded_and_planned_before_the_first_run(emoji: Path) -> None:
    path = emoji / "emoji.yaml"
    given = load_config(path).config
    configs = configs_of(path, given, (), ["flow", "one_process"], steps=7)
    assert [(c.train.max_steps, c.checkpoint.at_end, c.run.trace) for c in configs.values()] == [(7, False, True)] * 2
    check(configs)
    with pytest.raises(ConfigError, match=r"^flow\+packing.policy=nope: .*packing.policy"):
        configs_of(path, given, (), ["flow", "flow+packing.policy=nope"], steps=7)
    small = configs_of(path, given, (), ["flow", "flow+pool.bytes=600KiB"], steps=7)
    with pytest.raises(PlanError, match=r"^flow\+pool.bytes=600KiB: .*set pool.bytes to"):
        check(small)
    sent = configs_of(path, given, ("cluster.address=http://127.0.0.1:8265",), ["flow"], steps=7)
    with pytest.raises(ConfigError, match="a benchmark is not sent as a job"):
        check(sent)


@pytest.mark.parametrize("key", ["train.max_steps=3", "run.trace=false", "checkpoint.every=2"])
def test_keys_that_a_benchmark_sets_itself_are_refused(emoji: Path, key: str) -> None:
    """They would be overridden without a word, or let the modes differ in what they are measured by."""
    path, name = emoji / "emoji.yaml", key.partition("=")[0]
    given = load_config(path).config
    with pytest.raises(ConfigError, match=rf"--set {name} is set by the benchmark itself"):
        configs_of(path, given, (key,), ["flow"], steps=7)
    with pytest.raises(ConfigError, match=rf"--modes flow\+{key}: {name} is set by the benchmark itself"):
        configs_of(path, given, (), [f"flow+{key}"], steps=7)


def test_the_page_and_the_tables_of_modes_whose_rates_are_far_apart(tmp_path: Path, emoji: Path) -> None:
    """The rate of a short bar stands behind it: white on white nobody could read it."""
    names = ("flow", "monolithic")
    reports = {name: read_report(write_run(tmp_path / name, emoji)) for name in names}
    runs = {"flow": [{RATE: 100.0, "mfu(%)": 30.0}], "monolithic": [{RATE: 2.0}]}
    peaks = {"flow": "unknown: <B>", "monolithic": "unknown: <B>"}
    measured = Measured(runs, reports, {"flow": [0.9]}, peaks, PlanError("full"), "round 2, flow")
    found = Bench(measured, {})
    assert found.rates == [("flow", "100.00 (0 %)", "", "0.900"), ("monolithic", "2.00 (0 %)", "50.000", "")]
    head, rows = found.figures
    assert head == ("", "flow", "monolithic")
    assert ("mfu(%)", "30", "") in rows
    page = bench_page(found)
    assert found.peaks == ["peak of flow, monolithic: unknown: <B>"]
    assert "peak of flow, monolithic: unknown: &lt;B&gt;" in page
    assert "<strong>ended early: round 2, flow</strong>" in page
    assert 'style="fill:#fff">100.00 samples/s' in page
    assert 'style="fill:#fff">2.00 samples/s' not in page
    assert ">2.00 samples/s<" in page
    assert json.loads(json.dumps(found.to_dict()))["incomplete"] == "ended early: round 2, flow"
