"""Names of the records, MFU by hand, totals over a run and its resume."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flowtrain.flops import StepFlops
from flowtrain.telemetry.mfu import Fleet, Peak
from flowtrain.telemetry.step_metrics import StepMetrics
from flowtrain.telemetry.totals import MAX_IDS, Totals
from flowtrain.types import Cut, Module, SkippedRow

TERA = 1e12
FLEET = Fleet((Peak(TERA, "vendor: A"),), (Peak(TERA, "vendor: A"), Peak(2 * TERA, "measured: B")))

C12_NAMES = {
    "loss_metrics/global_avg_loss",
    "grad_norm",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "memory/max_active(GiB)",
    "mfu/encoder(%)",
    "mfu/backbone(%)",
    "pool/occupancy(%)",
    "pool/bytes_in",
    "pool/bytes_out",
    "flow/production_rate",
    "flow/consumption_rate",
    "flow/starvation(s)",
    "flow/stall(s)",
    "pack/fill(%)",
    "pack/imbalance",
    "grad_norm/encoder",
    "grad_norm/projector",
    "grad_norm/backbone",
}
C11_NAMES = {"step", "rows", "tokens/text", "tokens/vision", "tokens/trained", "lr"}


def metrics(step: int = 1, **changes: Any) -> StepMetrics:
    known = StepMetrics(
        step=step,
        epoch=0,
        rows=8,
        text_tokens=300,
        vision_tokens=100,
        trained_tokens=50,
        loss=1.25,
        grad_norm=0.5,
        module_norms={Module.BACKBONE: 0.5},
        lr={Module.ENCODER: 1e-4, Module.BACKBONE: 1e-3},
        seconds=2.0,
        num_packs=4,
        capacity_tokens=800,
        starvation={0: 0.5, 1: 0.1},
        stall={0: 1.5},
        producer_seconds={0: 0.5},
        consumer_seconds={0: 1.0, 1: 3.0},
        predicted_costs={0: 10.0, 1: 10.0},
        pool_bytes_in=1000,
        pool_bytes_out=900,
        pool_occupancy=0.25,
        max_memory_bytes=2**30,
        flops=StepFlops(encoder=0.8 * TERA, projector=0.2 * TERA, backbone=3 * TERA),
        fleet=FLEET,
    )
    return replace(known, **changes)


def test_the_record_has_every_agreed_name() -> None:
    assert metrics().to_record().keys() >= C11_NAMES | C12_NAMES


def test_values_by_hand() -> None:
    record = metrics().to_record()
    assert record["loss_hex"] == (1.25).hex()
    assert record["throughput(tps)"] == pytest.approx(400 / 2 / 3)
    assert record["tflops"] == pytest.approx(4 / 2 / 3)
    assert record["mfu(%)"] == pytest.approx(100 * 4 / (2 * 4))
    assert record["mfu/encoder(%)"] == pytest.approx(100 * 1 / (2 * 1))
    assert record["mfu/backbone(%)"] == pytest.approx(100 * 3 / (2 * 3))
    assert record["mfu/peak_source"] == "vendor: A; measured: B"
    assert record["flow/starvation(s)"] == pytest.approx(0.3)
    assert record["flow/stall(s)"] == 1.5
    assert record["flow/production_rate"] == pytest.approx(100 / 0.5)
    assert record["flow/consumption_rate"] == pytest.approx(100 / 2.0)
    assert record["pack/fill(%)"] == pytest.approx(50)
    assert record["pack/imbalance"] == 1.0
    assert record["pack/imbalance_measured"] == pytest.approx(1.5)
    loads = {name: value for name, value in record.items() if name.startswith("pack/load/")}
    assert loads == {"pack/load/consumer-0": 0.5, "pack/load/consumer-1": 1.5}, "a side of one rank has none"
    assert record["memory/max_active(GiB)"] == 1.0
    assert record["lr"] == 1e-3
    assert record["lr/encoder"] == 1e-4
    assert record["grad_norm/encoder"] is None


def test_loads_of_ranks_are_of_sides_that_a_chart_can_show() -> None:
    many = metrics(producer_seconds=dict.fromkeys(range(17), 1.0), consumer_seconds={0: 0.0, 1: 0.0}).to_record()
    loads = {name: value for name, value in many.items() if name.startswith("pack/load/")}
    assert loads == {"pack/load/consumer-0": None, "pack/load/consumer-1": None}


def test_what_is_not_known_is_null_and_json() -> None:
    record = metrics(fleet=None, flops=None, pool_occupancy=None, max_memory_bytes=None, stall={}).to_record()
    for name in ("mfu(%)", "tflops", "throughput(tps)", "pool/occupancy(%)", "memory/max_active(GiB)", "flow/stall(s)"):
        assert record[name] is None, name
    json.dumps(record, allow_nan=False)
    known_speed = metrics(flops=None).to_record()
    assert known_speed["throughput(tps)"] is not None
    assert known_speed["mfu(%)"] is None


def test_only_the_last_ranks_waiting_prolongs_a_step() -> None:
    """Rank 0: busy 1, waits 0.5 + 0.2; rank 1: busy 3, waits 0.1 + 0.2. 4 s could have been 3.7."""
    record = metrics(seconds=4.0, gradient_wait={0: 0.2, 1: 0.2}).to_record()
    assert record["mfu/gap_to_llm_only(%)"] == pytest.approx(100 * 0.3 / 4)
    assert record["mfu/backbone(%)"] == pytest.approx(25.0)
    assert record["mfu/llm_only(%)"] == pytest.approx(25.0 * 4 / 3.7)
    hidden = metrics(seconds=4.0, starvation={0: 1.5, 1: 0.0}).to_record()
    assert hidden["mfu/gap_to_llm_only(%)"] == 0.0
    assert hidden["mfu/llm_only(%)"] == hidden["mfu/backbone(%)"]


def test_an_unknown_peak_is_null_with_its_reason() -> None:
    unknown = Peak(None, "unknown: no dense float64 figure of NVIDIA L4 is in the table of devices")
    record = metrics(fleet=Fleet((unknown,), (Peak(TERA, "vendor: A"),)), palm_flops=TERA).to_record()
    assert record["mfu(%)"] is record["mfu/encoder(%)"] is record["mfu/peak_tflops"] is None
    assert record["mfu/backbone(%)"] == pytest.approx(150)
    assert record["mfu/backbone_palm(%)"] == pytest.approx(50)
    assert record["mfu/peak_source"].startswith("unknown: no dense float64 figure of NVIDIA L4")
    assert record["tflops"] is not None


# --- MFU --------------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_docs() -> None:
    fleet = Fleet((Peak(TERA, "x"),), (Peak(TERA, "x"),))
    shares = fleet.mfu(StepFlops(encoder=TERA, projector=0.0, backbone=1.6 * TERA), 2.0)
    assert shares[:3] == pytest.approx((65, 50, 80))


def test_the_projector_counts_where_it_runs() -> None:
    fleet = Fleet((Peak(TERA, "x"),), (Peak(TERA, "x"),), Cut.BEFORE_PROJECTOR)
    shares = fleet.mfu(StepFlops(encoder=TERA, projector=TERA, backbone=TERA), 10.0)
    assert shares[:3] == pytest.approx((15, 10, 20))


def test_one_shared_device_is_counted_once() -> None:
    peak = Peak(TERA, "x")
    shares = Fleet((peak,), (peak,), colocated=True).mfu(StepFlops(encoder=TERA, projector=TERA, backbone=TERA), 10.0)
    assert shares.all == pytest.approx(30)
    assert (shares.encoder, shares.backbone) == pytest.approx((20, 10))


def test_per_device_and_per_cluster_agree() -> None:
    """Tokens and FLOPs of all devices are never divided by the peak of one (T03)."""
    one, peak = StepFlops(0.5 * TERA, 0.0, 1.5 * TERA), Peak(TERA, "x")
    three = StepFlops(*(3 * part for part in one))
    alone, together = Fleet((peak,), (peak,)).mfu(one, 2.0), Fleet((peak,) * 3, (peak,) * 3).mfu(three, 2.0)
    assert alone == together == (50.0, 25.0, 75.0, None)


# --- totals -----------------------------------------------------------------------------------------------------------


def skipped(number: int, reason: str = "too-long") -> SkippedRow:
    return SkippedRow(number, number, f"id-{number}", reason, "detail")


def test_a_resumed_run_counts_on() -> None:
    whole, first = Totals(), Totals()
    for totals in (whole, first):
        totals.step(metrics(1))
        totals.skip(skipped(3))
        totals.own_pack("long")
        totals.evaluated(2.5)
        totals.step(metrics(2, rows=7, loss=1.0))
    resumed = Totals.from_state(json.loads(json.dumps(first.state())))
    for totals in (whole, resumed):
        totals.skip(skipped(4, "image-missing"))
        totals.step(metrics(3))
    assert whole.summary(0) == resumed.summary(0)
    assert first.rows_skipped == 1


def test_the_summary_has_the_agreed_form() -> None:
    totals = Totals()
    totals.step(metrics(1))
    for number in range(30):
        totals.skip(skipped(number))
    totals.evaluated(0.75)
    totals.wall_seconds = 12.5
    summary = totals.summary(3)
    final, run = summary.pop("final"), summary.pop("run")
    assert summary == {
        "exit": 3,
        "steps": 1,
        "rows": {
            "read": 38,
            "trained": 8,
            "skipped": {"too-long": {"count": 30, "ids": [f"id-{number}" for number in range(MAX_IDS)]}},
        },
        "tokens": {"text": 300, "vision": 100, "trained": 50},
        "packs": {"count": 4, "fill": 0.5, "rows": 2.0, "own": {"count": 0, "ids": []}},
        "wall_s": 12.5,
    }
    assert final["loss_metrics/global_avg_loss"] == 1.25
    assert run["pack/imbalance_measured"] == 1.5
    assert run["tokens/trained"] == 50
    assert final["validation_metrics/loss"] == 0.75


def test_a_runs_rates_are_its_sums_and_no_means_of_means() -> None:
    """400 tokens in 2 s, then 400 in 6 s, on 3 devices: 800 / 8 / 3, not the mean of 400 / 2 / 3 and 400 / 6 / 3."""
    totals = Totals()
    totals.step(metrics(1, seconds=2.0))
    totals.step(metrics(2, seconds=6.0, starvation={}))
    run = totals.summary(0)["run"]
    assert run["throughput(tps)"] == pytest.approx(800 / 8 / 3)
    assert run["mfu(%)"] == pytest.approx(100 * 8 / (8 * 4))
    assert run["time_metrics/end_to_end(s)"] == 8.0
    assert run["flow/starvation(s)"] == pytest.approx(0.3), "what a step does not know is no 0"
    assert run["memory/max_active(GiB)"] == 1.0


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = Totals().summary(2)
    assert summary["steps"] == 0
    assert summary["packs"] == {"count": 0, "fill": None, "rows": None, "own": {"count": 0, "ids": []}}
    json.dumps(summary, allow_nan=False)


def test_steps_are_counted_once() -> None:
    totals = Totals()
    totals.step(metrics(2))
    with pytest.raises(AssertionError, match="step 2 comes after step 2"):
        totals.step(metrics(2))
