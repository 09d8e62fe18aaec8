"""`flowtrain plan`: answers quickly and lightly, as text, data and plan file; refuses in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from profiles import MADE

from flowtrain.allocator.planfile import obey, read_plan_file
from flowtrain.allocator.profile import (
    Measured,
    PackWork,
    Profile,
    Timing,
    dump_profile,
    profile_key,
)
from flowtrain.allocator.stats import read_stats
from flowtrain.cli.main import make_app
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.shapes import read_shape
from flowtrain.types import Role

EXAMPLE = Path(__file__).parents[3] / "examples/emoji"


def run(*arguments: object) -> None:
    make_app()(["plan", *map(str, arguments)], standalone_mode=False)


def test_a_model_folder_on_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, plan = tmp_path / "plan.json", tmp_path / "plan.yaml"
    run(
        EXAMPLE / "model",
        "--device",
        "h100",
        "--nodes",
        2,
        "--json",
        data,
        "--out",
        plan,
        "--placement",
        "disaggregated",
    )
    text = capsys.readouterr().out
    for word in ("samples/s", "MFU", "memory", "binding:", "sensitivity:", "assumed data", "layout"):
        assert word in text
    result: dict[str, Any] = json.loads(data.read_text())
    assert result["devices"] <= 16
    assert result["samples_per_second"] > 0
    assert {"vision", "backbone"} == set(result["modules"])
    assert result["modules"]["backbone"]["memory_parts_bytes"]["weights"] > 0
    assert_parts_add_up(result)
    read = read_plan_file(plan)
    assert read.placement == "disaggregated"
    assert read.layouts[Role.CONSUMER] == result["modules"]["backbone"]["layout"]
    assert yaml.safe_load(plan.read_text())["expected"]["samples_per_second"] == result["samples_per_second"]


def assert_parts_add_up(result: dict[str, Any]) -> None:
    for module in result["modules"].values():
        assert sum(module["memory_parts_bytes"].values()) == pytest.approx(module["memory_bytes"])


def test_a_config_with_mixed_devices_and_a_policy(tmp_path: Path) -> None:
    data = tmp_path / "plan.json"
    run(
        EXAMPLE / "emoji.yaml", "--device", "a100:1", "--device", "l40s:2", "--policy", "flops_proportional",
        "--set", "model.dtype=bfloat16", "--json", data,
    )  # fmt: skip
    result = json.loads(data.read_text())
    assert result["devices_available"] == 24
    assert result["step_samples"] == 32


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        (("cpu", "--devices-per-node", "4"), ("producers.threads=2",)),
        (("cpu", "--devices-per-node", "4"), ("producers.threads=null", "consumers.threads=2")),
        (("cpu", "--devices-per-node", "4"), ("producers.threads=2", "allocation.placement=colocated")),
        (("cpu", "--devices-per-node", "6"), ("producers.num=null", "consumers.num=2")),
        (("h100",), ("producers.threads=2", "consumers.threads=3", "model.dtype=bfloat16")),
        (("h100",), ("producers.num=null", "consumers.layout=f2", "consumers.num=null")),
    ],
)
def test_a_launch_obeys_the_plan_of_its_own_config(
    tmp_path: Path, device: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    """What is set binds the plan, and what is open comes from it."""
    plan, data = tmp_path / "plan.yaml", tmp_path / "plan.json"
    chosen = [text for one in settings for text in ("--set", one)]
    run(EXAMPLE / "emoji.yaml", "--device", *device, *chosen, "--out", plan, "--json", data)
    assert_parts_add_up(json.loads(data.read_text()))
    config = load_config(EXAMPLE / "emoji.yaml", settings).config
    read = read_plan_file(plan)
    obeyed = obey(config, read, read_shape(config.model.path))
    for role, before, after in (
        (Role.PRODUCER, config.producers, obeyed.producers), (Role.CONSUMER, config.consumers, obeyed.consumers),
    ):  # fmt: skip
        assert after.layout == read.layouts[role]
        if before.num is not None:
            assert after.layout == f"r{before.num}"
        if before.threads is not None and obeyed.placement != "colocated":
            assert after.threads == before.threads


BIG = EXAMPLE.parent / "plans/qwen2.5-vl-7b"


def test_a_plan_is_one_that_launch_runs(tmp_path: Path) -> None:
    """A large model, all trained: recomputation goes with the layouts; colocated sides that are cut are for `--any`."""
    plan = tmp_path / "plan.yaml"
    settings = (
        f"model.path={BIG}", "model.dtype=bfloat16", "packing.max_tokens=8192", "train.step.samples=256",
        "producers.num=null", "producers.threads=null", "consumers.num=null", "consumers.threads=null",
    )  # fmt: skip
    chosen = [text for one in settings for text in ("--set", one)]
    run(EXAMPLE / "emoji.yaml", "--device", "h100", *chosen, "--out", plan)
    config = load_config(EXAMPLE / "emoji.yaml", settings).config
    shape, read = read_shape(BIG), read_plan_file(plan)
    obeyed = obey(config, read, shape)
    assert obeyed.recompute(Role.PRODUCER) is read.recompute[Role.PRODUCER] is not None
    assert obeyed.recompute(Role.CONSUMER) is read.recompute[Role.CONSUMER] is not None
    other = not read.recompute[Role.CONSUMER]
    against = load_config(EXAMPLE / "emoji.yaml", (*settings, f"train.gradient_checkpointing={other}".lower())).config
    with pytest.raises(PlanError, match=r"gradient_checkpointing: the plan says \w+ and the config"):
        obey(against, read, shape)
    with pytest.raises(PlanError, match=r"of a device at least.*--any plans what this release cannot launch"):
        run(EXAMPLE / "emoji.yaml", "--device", "h100", *chosen, "--placement", "colocated")
    run(EXAMPLE / "emoji.yaml", "--device", "h100", *chosen, "--placement", "colocated", "--any", "--out", plan)
    with pytest.raises(PlanError, match="as many whole copies"):
        obey(config, read_plan_file(plan), shape)


def test_rows_that_are_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    trace = EXAMPLE.parents[1] / "benchmarks/traces/mix_sft_8k.parquet"
    run(EXAMPLE / "model", "--device", "h100", "--data", trace, "--pack-tokens", 2048)
    text = capsys.readouterr().out
    stats = read_stats(trace)
    assert f"{(stats.lengths > 2048).sum()} of {len(stats)} rows have more than 2048 tokens" in text


def measured(config: Config) -> Profile:
    """What a fast backbone beside a slow encoder would leave in a profile of this config."""

    def stage(role: Literal["producer", "consumer"], seconds: float, threads: int, colocated: bool) -> Measured:
        timing = (Timing(work=1.0, seconds=seconds, spread=0.0, num=4),)
        return Measured(
            role=role, device="cpu", threads=threads, together=False, colocated=colocated, forward=timing,
            backward=timing if role == "producer" else (), update_seconds=0.0,
        )  # fmt: skip

    made = MADE.model_copy(update={"config": profile_key(config)})
    stages = (
        stage("producer", 1.0, 1, False), stage("consumer", 1.0, 1, False),
        stage("producer", 0.4, 2, True), stage("consumer", 0.4, 2, True),
    )  # fmt: skip
    return Profile(
        made=made, trainable_encoder=True, consumers=1, read_seconds=0.0, call_seconds=0.0, overhead_seconds=0.0,
        stages=stages, steps=((PackWork(rows=4, encode=1.0, train=1.0),),),
    )  # fmt: skip


def test_a_profile_plans_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data, plan = tmp_path / "profile.yaml", tmp_path / "plan.json", tmp_path / "plan.yaml"
    config = load_config(EXAMPLE / "emoji.yaml").config
    file.write_text(dump_profile(measured(config)))
    run(EXAMPLE / "emoji.yaml", "--profile", file, "--json", data, "--out", plan)
    told = capsys.readouterr()
    assert "samples/s predicted" in told.out
    assert f"warning: {file} was measured on {MADE.device}" in told.err
    result = json.loads(data.read_text())
    assert result["placement"] == "disaggregated"  # the mode's: nothing is open in this config
    assert result["expected"]["samples_per_second"] == pytest.approx(4 / 3.0)
    assert read_plan_file(plan).layouts == {Role.PRODUCER: "r1", Role.CONSUMER: "r1"}
    with pytest.raises(ConfigError, match="measured with"):
        run(EXAMPLE / "emoji.yaml", "--profile", file, "--set", "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match="this machine"):
        run(EXAMPLE / "model", "--profile", file)
    with pytest.raises(ConfigError, match="use --set"):
        run(EXAMPLE / "emoji.yaml", "--profile", file, "--policy", "uniform")


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (["emoji.yaml"], ConfigError, "--device h100"),
        (["emoji.yaml", "--device", "abacus"], ConfigError, "abacus"),
        (["emoji.yaml", "--device", "h100:none"], ConfigError, "number of nodes"),
        (["model", "--device", "h100:²"], ConfigError, "number of nodes"),
        (["model", "--device", "h100:2", "--nodes", "5"], ConfigError, "--nodes 5 beside --device h100:2"),
        (["model", "--device", "h100:9999999"], ConfigError, "79999992 devices .* 262144"),
        (["model", "--dtype", "int4"], ConfigError, "bfloat16"),
        (["model", "--freeze", "encoder", "--freeze", "projector", "--freeze", "backbone"], ConfigError, "train"),
        (["model", "--data", "."], ConfigError, "folder"),
        (["emoji.yaml", "--device", "h100", "--set", "producers.num=64"], PlanError, "producers.num: 64"),
        (["emoji.yaml", "--device", "h100", "--freeze", "encoder"], ConfigError, "--set"),
        (["model", "--set", "train.lr=1"], ConfigError, "--set"),
        (["model", "--freeze", "head"], ConfigError, "backbone"),
        (["model", "--policy", "best"], ConfigError, "flow_matching"),
        (["model", "--placement", "here"], ConfigError, "colocated"),
        (["model", "--data", "nothing.jsonl"], ConfigError, r"nothing\.jsonl"),
        (["emoji.yaml", "--device", "l40s", "--set", "model.dtype=float64"], PlanError, "float64"),
    ],
)
def test_what_cannot_be_planned_is_told(arguments: list[str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        run(EXAMPLE / arguments[0], *arguments[1:])


def test_refused_with_exit_code_4_and_one_line(tmp_path: Path) -> None:
    config = json.loads((EXAMPLE / "model/config.json").read_text())
    config["text_config"] |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 90}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = "from flowtrain.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(tmp_path), "--device", "l40s"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no plan fits" in done.stderr
    assert "would fit on" in done.stderr


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; from flowtrain.cli.main import make_app\n"
        f"make_app()(['plan', {str(EXAMPLE / 'model')!r}, '--nodes', '4'], standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
