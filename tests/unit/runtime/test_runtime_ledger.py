"""The books of a run: what is written for each step, across a resume, and what the summary adds up to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flowtrain.allocator import Inventory, make_plan
from flowtrain.config.schema import Config
from flowtrain.errors import DataError
from flowtrain.messages import PackTrained, PoolUse, UnitEncoded, UnitsReturned, UpdateReport
from flowtrain.packing import Composer, CompositionSpec, CostModel, compose_eval
from flowtrain.parallel.mesh import dp_rank
from flowtrain.plan import layout_of
from flowtrain.runtime.decisions import Choice
from flowtrain.runtime.executor import StageReport
from flowtrain.runtime.ledger import Ledger
from flowtrain.runtime.pace import Pace
from flowtrain.runtime.step_end import StepResult
from flowtrain.shapes import read_shape
from flowtrain.telemetry.mfu import Peak
from flowtrain.telemetry.run_files import RunFiles
from flowtrain.types import EmbeddingRef, ImageMeta, Module, Phase, Role, SampleMeta, SkippedRow, Step

COST = CostModel.from_coefficients(token=1.0, patch=1.0)
MODEL = Choice(COST, "model")
NUM_ROWS = 12
UPDATES = {
    (Role.PRODUCER, 0): UpdateReport(1, 2**29),
    (Role.CONSUMER, 0): UpdateReport(1, 2**30, waited=0.5),
    (Role.CONSUMER, 1): UpdateReport(1, 2**28, waited=0.5),
}
SPEC = CompositionSpec(
    num_rows=NUM_ROWS,
    step_samples=4,
    step_packs=None,
    policy="arrival",
    max_tokens=24,
    lookahead=1,
    num_consumers=2,
    num_producers=1,
    trainable_encoder=True,
    max_unit_patches=64,
    max_pack_vision_bytes=1 << 20,
    horizon=NUM_ROWS,
    block_bytes=lambda tokens, patches: 64 * tokens,
)


def sample(position: int) -> SampleMeta:
    return SampleMeta.of(position, position, f"id-{position}", 8, 4, 2, (ImageMeta(32, 32, 4, 16, 256),))


def steps() -> list[Step]:
    composer = Composer(SPEC, COST)
    for position in range(NUM_ROWS):
        composer.add([sample(position)])
    made = []
    while (step := composer.next()) is not None:
        made.append(step)
    return made


@pytest.fixture
def make_ledger(digits: Path, tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    stack = ExitStack()

    def make(
        state: dict[str, Any] | None = None,
        resume_step: int | None = None,
        producers: int = 1,
        recompute: bool = False,
        consumers: str = "r2",
    ) -> Ledger:
        config = Config.model_validate(
            {
                "run": {"dir": tmp_path},
                "model": {"path": digits / "model"},
                "data": {"train": digits / "data/train.parquet"},
                "consumers": {"layout": consumers},
                "producers": {"num": producers, "backward": "recompute" if recompute else "keep"},
                "train": {"gradient_checkpointing": recompute},
                "packing": {"max_tokens": SPEC.max_tokens},
                "telemetry": {"progress": "off"},
            }
        )
        shape = read_shape(config.model.path)
        plan = make_plan(config, shape, Inventory(cpus=8, gpus=0, memory_bytes=1 << 33, shm_bytes=1 << 33))
        files = stack.enter_context(RunFiles(tmp_path, resume_step))
        return Ledger(config, shape, plan, files, state, total=3)

    with stack:
        yield make


def carry_out(ledger: Ledger, step: Step, bad: dict[int, SkippedRow], loss: float = 2.0) -> None:
    """Every event of a step, as the controller tells them."""
    for pack in step.packs:
        for unit in pack.units:
            refs = tuple(EmbeddingRef(s.position, unit.id, 0, 256, (), (), 0) for s in unit.samples)
            put = PoolUse(0.125, {"own": 256 * len(refs)}, {}, pinned_bytes=4096)
            ledger.encoded(UnitEncoded(unit.id, 0, refs, (), seconds=0.5, waited=0.25, pool=put), occupancy=0.125)
        got = PoolUse(0.0625, {"shm": 128}, {"shm": 512}, pinned_bytes=4096)
        seconds = 1.0 + pack.rank
        ledger.trained(PackTrained(Phase.TRAIN, step.index, pack.slot, pack.rank, 1.0, 4, seconds, 0.5, pool=got), 512)
        if pack.units:
            ids = tuple(unit.id for unit in pack.units)
            ledger.returned(UnitsReturned(ids, 0, seconds=0.25, waited=0.125, pool=PoolUse(pinned_bytes=4096)))
    tokens = 2 * (step.rows - len(bad))
    result = StepResult(loss, tokens, {Module.BACKBONE: 9.0, Module.ENCODER: 16.0}, clip=0.2, applied=True, finite=True)
    ledger.updated(step, result, {Module.BACKBONE: 1e-3}, bad)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_written_with_what_each_side_did(make_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    ledger, step = make_ledger(), steps()[0]
    ledger.composed(step, [SkippedRow(0, 0, "id-skipped", "too-long", "")], MODEL)
    bad = {step.samples[1].position: SkippedRow(1, 1, step.samples[1].id, "image-undecodable", "")}
    carry_out(ledger, step, bad)
    ledger.record(1, UPDATES, {})
    ledger.close(None)

    num_units = sum(len(pack.units) for pack in step.packs)
    num_packs = sum(bool(pack.units) for pack in step.packs)
    [record] = lines(tmp_path / "metrics.jsonl")
    busy = 0.5 * num_units + 0.25 * num_packs
    assert record["rows"] == step.rows - 1
    assert record["rows/skipped"] == 2
    assert record["rows/skipped/too-long"] == record["rows/skipped/image-undecodable"] == 1
    assert record["tokens/vision"] == 4 * (step.rows - 1)
    assert record["grad_norm"] == 5.0
    assert record["grad_norm/projector"] is None
    assert record["flow/stall(s)"] == 0.25 * num_units + 0.125 * num_packs
    assert record["flow/production_rate"] == pytest.approx(record["tokens/vision"] / busy)
    assert record["pool/bytes_in"] == record["pool/bytes_in/own"] == 256 * step.rows
    assert record["pool/bytes_in/shm"] == 128 * len(step.packs)
    assert record["pool/bytes_out/shm"] == 512 * len(step.packs)
    assert record["pool/seconds"] == 0.125 * num_units, "of the rank that spent most"
    assert record["pool/pinned_bytes"] == 4096 * (1 + len({pack.rank for pack in step.packs}))
    assert record["pool/bytes_out"] == 512 * len(step.packs)
    assert record["pool/occupancy(%)"] == 12.5
    assert record["memory/max_active(GiB)"] == 1.0

    trained = [row for written in lines(tmp_path / "samples.jsonl") for row in written["ids"]]
    assert sorted(trained) == sorted(s.id for s in step.samples if s.position not in bad)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit"] == 0
    assert summary["rows"]["read"] == summary["rows"]["trained"] + 2
    assert summary["rows"]["skipped"]["image-undecodable"] == {"count": 1, "ids": [step.samples[1].id]}


def test_totals_of_a_resumed_run_are_those_of_one_never_stopped(
    make_ledger: Callable[..., Ledger], tmp_path: Path
) -> None:
    def go(ledger: Ledger, some: list[Step]) -> None:
        for step in some:
            ledger.composed(step, [SkippedRow(0, 0, f"skipped-{step.index}", "too-long", "")], MODEL)
            carry_out(ledger, step, {}, loss=float(step.index))
            ledger.record(step.index, UPDATES, {})

    def summary() -> dict[str, Any]:
        values = json.loads((tmp_path / "summary.json").read_text())
        timed = ("wall_s", "final", "run")
        return {name: value for name, value in values.items() if name not in timed}

    whole = make_ledger()
    go(whole, steps())
    whole.close(None)
    at_once, written = summary(), (tmp_path / "samples.jsonl").read_text()

    first = make_ledger()
    go(first, steps()[:1])
    state = json.loads(json.dumps({"totals": first.totals_state()}))
    go(first, steps()[1:])
    first.close(DataError("stopped"))
    assert summary()["exit"] == DataError.exit_code

    second = make_ledger(state, resume_step=1)
    go(second, steps()[1:])
    second.close(None)
    assert summary() == at_once
    assert (tmp_path / "samples.jsonl").read_text() == written


def test_what_is_computed_again_never_counts(make_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    def flops(recompute: bool) -> dict[str, float]:
        ledger, step = make_ledger(recompute=recompute), steps()[0]
        ledger.composed(step, [], MODEL)
        carry_out(ledger, step, {})
        ledger.record(1, UPDATES, {})
        [record] = lines(tmp_path / "metrics.jsonl")
        return {name: value for name, value in record.items() if name.startswith("flops/")}

    once = flops(recompute=False)
    assert once.keys() == {"flops/encoder", "flops/projector", "flops/backbone"}
    assert min(once.values()) > 0
    assert flops(recompute=True) == once


def test_a_trainable_encoders_tail_counts_as_waiting(make_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    """Rank 1 is busy longest; it waits 0.5 s a pack for features and 0.5 s for the encoder's gradients."""
    ledger, step = make_ledger(), steps()[0]
    ledger.composed(step, [], MODEL)
    carry_out(ledger, step, {})
    ledger._books[1].seconds = 100.0
    ledger.record(1, UPDATES, {})
    [record] = lines(tmp_path / "metrics.jsonl")
    packs = sum(pack.rank == 1 for pack in step.packs)
    assert record["mfu/gap_to_llm_only(%)"] == pytest.approx(0.5 * packs + 0.5)


@pytest.mark.parametrize("layout", ["r2t2", "r2p2", "f2c2"])
def test_ranks_of_one_data_parallel_rank_wait_once(
    make_ledger: Callable[..., Ledger], tmp_path: Path, layout: str
) -> None:
    """Four processes are two data-parallel ranks; the second, which is busy longest, waits 0.5 s and the first 0.25."""
    ledger, step = make_ledger(consumers=layout), steps()[0]
    ledger.composed(step, [], MODEL)
    carry_out(ledger, step, {})
    ledger._books[1].seconds = 100.0
    waits = {rank: 0.25 if dp_rank(layout_of(layout), rank) == 0 else 0.5 for rank in range(4)}
    reports = {(Role.CONSUMER, rank): UpdateReport(1, 2**28, waited=waited) for rank, waited in waits.items()}
    ledger.record(1, reports, {})
    [record] = lines(tmp_path / "metrics.jsonl")
    packs = sum(pack.rank == 1 for pack in step.packs)
    assert record["mfu/gap_to_llm_only(%)"] == pytest.approx(0.5 * packs + 0.5)


def test_an_evaluation_pass_is_no_step_of_training(make_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    ledger, step = make_ledger(), steps()[0]
    passed = compose_eval(SPEC, COST, [sample(position) for position in range(4)], 1)
    ledger.composed(step, [], MODEL)
    carry_out(ledger, step, {})
    for pack in passed.packs:
        ledger.trained(PackTrained(Phase.EVAL, 1, pack.slot, pack.rank, 1.0, 4, 100.0, 100.0), 1 << 20)
    ledger.evaluated(1, 1.5)
    ledger.record(1, UPDATES, {})
    ledger.close(None)
    [record] = lines(tmp_path / "metrics.jsonl")
    assert record["validation_metrics/loss"] == 1.5
    assert record["flow/starvation(s)"] < 100
    assert record["pool/bytes_out"] == 512 * len(step.packs)
    assert json.loads((tmp_path / "summary.json").read_text())["final"]["validation_metrics/loss"] == 1.5


def test_times_are_predicted_from_those_before() -> None:
    pace, second = Pace(), Choice(CostModel.from_coefficients(token=2e-3), "fitted")
    assert pace.error(MODEL, [(100, 1.0), (300, 3.0)]) is None, "nothing is known of the first packs"
    assert pace.error(MODEL, [(200, 2.0), (100, 2.0)]) == pytest.approx(0.25)
    cost = second.cost.sample_cost(sample(0))
    assert pace.error(second, [(cost, 2e-3 * 12)]) == pytest.approx(0, abs=1e-5), "a fitted cost is in seconds"
    assert pace.error(second, []) is None


def test_a_run_that_ends_early_says_why(make_ledger: Callable[..., Ledger], capsys: pytest.CaptureFixture[str]) -> None:
    ledger, step = make_ledger(), steps()[0]
    ledger.composed(step, [SkippedRow(0, 0, "id-skipped", "too-long", "")], MODEL)
    carry_out(ledger, step, {})
    ledger.record(1, UPDATES, {})
    ledger.close(None)
    assert "the run ended after 1 of 3 steps: epochs count rows, and 1 of 5 were skipped" in capsys.readouterr().out


def test_both_sides_tell_how_evenly_they_are_loaded(make_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    """Balance on text tokens alone leaves vision stragglers, so the producers' loads are told as well (P13)."""
    ledger, step = make_ledger(producers=2), steps()[0]
    ledger.composed(step, [], MODEL)
    units = [unit for pack in step.packs for unit in pack.units]
    for number, unit in enumerate(units):
        refs = tuple(EmbeddingRef(s.position, unit.id, 0, 256, (), (), 0) for s in unit.samples)
        producer = int(number > 0)
        ledger.encoded(UnitEncoded(unit.id, producer, refs, (), 3.0 if producer else 1.0, 0.0), occupancy=0.0)
    for pack in step.packs:
        seconds = 1.0 + 2.0 * pack.rank
        ledger.trained(PackTrained(Phase.TRAIN, step.index, pack.slot, pack.rank, 1.0, 4, seconds, 0.0), 0)
    result = StepResult(1.0, 8, {}, clip=1.0, applied=True, finite=True)
    ledger.updated(step, result, {Module.BACKBONE: 1e-3}, {})
    ledger.record(1, UPDATES, {})
    ledger.close(None)
    [record] = lines(tmp_path / "metrics.jsonl")
    patches = [unit.patches for unit in units]
    rest = sum(patches[1:])
    assert record["pack/imbalance_encoder"] == pytest.approx(2 * max(patches[0], rest) / sum(patches))
    assert record["pack/imbalance_encoder_measured"] == pytest.approx(2 * 3.0 * (len(units) - 1) / (3 * len(units) - 2))
    assert record["pack/imbalance"] == pytest.approx(1.0)
    assert record["pack/imbalance_measured"] == pytest.approx(1.5)
    assert record["pack/cost_error(%)"] is None


def test_a_peak_that_is_not_known_is_told_at_the_start(
    make_ledger: Callable[..., Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the progress line is without MFU, and nobody says why."""
    known, unknown = Peak(1e12, "vendor: A"), Peak(None, "unknown: no dense float64 figure of B is in the table")
    for peaks, told in (
        ((known, unknown, unknown), "warning: MFU is left out where it needs a peak that is " + unknown.source + "\n"),
        ((known, known, known), ""),
    ):
        sides = zip((Role.PRODUCER, Role.CONSUMER, Role.CONSUMER), (0, 0, 1), peaks, strict=True)
        make_ledger().started({(role, rank): StageReport(peak) for role, rank, peak in sides}, None)
        assert capsys.readouterr().out == told
