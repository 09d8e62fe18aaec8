"""`flowtrain plan`: answers quickly and lightly, as text, data and plan file; refuses in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowtrain.allocator.planfile import read_plan_file
from flowtrain.cli.main import make_app
from flowtrain.errors import ConfigError, PlanError
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
    read = read_plan_file(plan)
    assert read.placement == "disaggregated"
    assert read.layouts[Role.CONSUMER] == result["modules"]["backbone"]["layout"]
    assert yaml.safe_load(plan.read_text())["expected"]["samples_per_second"] == result["samples_per_second"]


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
    ("arguments", "error", "told"),
    [
        (["emoji.yaml"], ConfigError, "--device h100"),
        (["emoji.yaml", "--device", "abacus"], ConfigError, "abacus"),
        (["emoji.yaml", "--device", "h100:none"], ConfigError, "number of nodes"),
        (["emoji.yaml", "--device", "h100", "--freeze", "encoder"], ConfigError, "--set"),
        (["model", "--set", "train.lr=1"], ConfigError, "--set"),
        (["model", "--freeze", "head"], ConfigError, "backbone"),
        (["model", "--policy", "best"], ConfigError, "flow_matching"),
        (["model", "--placement", "here"], ConfigError, "colocated"),
        (["model", "--data", "nothing.jsonl"], ConfigError, r"nothing\.jsonl"),
        (["emoji.yaml", "--device", "h100", "--set", "model.dtype=float64"], PlanError, "float64"),
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
