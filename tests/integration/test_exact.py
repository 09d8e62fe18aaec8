"""A decoupled run computes what a plain single-process loop computes (contract C2), and planted faults are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from integration_runs import EXAMPLES, Train, make_config

from flowtrain.packing import POLICIES
from flowtrain.types import Module
from flowtrain.verify.run import check_config, compare_run

FREEZE = {
    "all-trainable": (),
    "encoder-frozen": ("encoder",),
    "only-projector": ("encoder", "backbone"),
    "backbone-frozen": ("backbone",),
}
SIDES = {"1+1": (1, 1), "2+1": (2, 1), "1+2": (1, 2), "2+2": (2, 2)}


def verify(train: Train, example: str, steps: int, *overrides: str):
    """Train as configured, in float64, and compare with the reference."""
    wanted = (f"train.max_steps={steps}", "train.epochs=null", "data.eval=null", "model.dtype=float64")
    run_dir = train(example, *wanted, *overrides, dump=True)
    config = check_config(make_config(example, run_dir, *wanted, *overrides), steps, "float64", run_dir)
    return compare_run(config)


def freeze_override(names: tuple[str, ...]) -> str:
    return f"train.freeze=[{', '.join(names)}]"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("freeze", FREEZE)
def test_decoupled_equals_plain(train: Train, freeze: str, sides: str) -> None:
    producers, consumers = SIDES[sides]
    numbers = (f"producers.num={producers}", f"consumers.num={consumers}", "train.step={samples: 8}")
    outcome = verify(train, "emoji", 2, freeze_override(FREEZE[freeze]), *numbers)
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.rows == 16


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("mode=monolithic",), id="colocated"),
        pytest.param(("mode=disaggregated", "producers.num=2"), id="disaggregated"),
        pytest.param(("pool.exchange=barrier_step", "producers.num=2", "consumers.num=2"), id="barrier-step"),
        pytest.param(("producers.backward=recompute", "pool.checksum=true"), id="recompute-checksums"),
        pytest.param(("mode=monolithic", "producers.backward=recompute"), id="colocated-recompute"),
        pytest.param(("train.gradient_checkpointing=true",), id="checkpointing"),
        pytest.param(("producers.num=2", "debug.delays.producer_unit_ms={0: 100}"), id="slowed-producer"),
        pytest.param(
            ("producers.num=2", "debug.delays.producer_unit_ms={1: 100}", freeze_override(("encoder",))),
            id="slowed-producer-frozen",
        ),
        pytest.param(("packing.policy=arrival", "producers.max_unit_patches=64"), id="arrival-small-units"),
        pytest.param(("train.clip_norm=null", "train.weight_decay=0.1"), id="no-clipping"),
    ],
)
def test_other_ways_equal_plain(train: Train, overrides: tuple[str, ...]) -> None:
    outcome = verify(train, "emoji", 2, "train.step={samples: 8}", *overrides)
    assert outcome.verdict.ok, outcome.verdict.sentence


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("arrival", "dynamic")])
def test_every_policy_equals_plain(train: Train, policy: str) -> None:
    """Two consumers; the default policy and `arrival` stand in the tests above."""
    overrides = (f"packing={{policy: {policy}, max_tokens: 512}}", "consumers.num=2", "train.step={samples: 8}")
    outcome = verify(train, "emoji", 2, *overrides)
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.rows == 16


def test_a_row_in_a_pack_of_its_own_equals_plain(train: Train) -> None:
    own = ("packing={max_tokens: 96, on_long_row: own_pack}", "data.max_seq_len=1024", "train.step={packs: 4}")
    outcome = verify(train, "emoji", 2, *own)
    assert outcome.verdict.ok, outcome.verdict.sentence


def test_digits_equal_plain(train: Train) -> None:
    outcome = verify(train, "digits", 2)
    assert outcome.verdict.ok, outcome.verdict.sentence


FAULTS = {
    "encoder_gradient_doubled": {Module.ENCODER},
    "encoder_gradient_divided_by_producers": {Module.ENCODER},
    "denominator_plus_one": set(Module),
    "denominator_minus_one": set(Module),
    "image_gradient_dropped": {Module.ENCODER},
    "images_swapped": {Module.ENCODER},
    "module_not_clipped": {Module.PROJECTOR},
    "sample_sees_neighbour": {Module.BACKBONE},
    "stale_encoder": {Module.ENCODER},
    "text_only_step_decays_encoder": {Module.ENCODER},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_and_named(train: Train, fault: str, text_only_rows: Path) -> None:
    overrides = ["train.step={samples: 8}", "producers.num=2", f"debug.faults=[{fault}]", "train.weight_decay=0.1"]
    if fault == "text_only_step_decays_encoder":
        overrides += [f"data.train={text_only_rows}", "run.seed=0"]
    outcome = verify(train, "emoji", 3, *overrides)
    assert not outcome.verdict.ok
    assert outcome.verdict.quantity != "faults", outcome.verdict.sentence
    assert set(outcome.verdict.modules) >= FAULTS[fault], outcome.verdict.sentence
    assert all(module.value in outcome.verdict.sentence for module in FAULTS[fault]), outcome.verdict.sentence


def test_text_only_steps_leave_the_encoder_alone(train: Train, text_only_rows: Path) -> None:
    overrides = ("train.step={samples: 8}", f"data.train={text_only_rows}", "train.weight_decay=0.1")
    outcome = verify(train, "emoji", 3, *overrides)
    assert outcome.verdict.ok, outcome.verdict.sentence


@pytest.mark.timeout(300)
def test_colocated_ranks_equal_plain(tmp_path: Path) -> None:
    """Both sides of a rank in one process, two such processes: in a Ray node of their own, which the command starts."""
    settings = ("mode=monolithic", "producers.num=2", "consumers.num=2", "train.step={samples: 8}")
    command = [sys.executable, "-m", "flowtrain.cli.main", "verify", str(EXAMPLES / "emoji/emoji.yaml"), "--steps", "1"]
    command += ["--out", str(tmp_path / "run"), *(part for setting in settings for part in ("--set", setting))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "verify passed: 1 steps" in ended.stdout
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["rank"] for sample in samples} == {0, 1}
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    sides = [plan[side] for side in ("producers", "consumers")]
    assert (plan["placement"], [side["layout"] for side in sides]) == ("colocated", ["r2", "r2"])
