"""`flowtrain simulate`: figures as text, data and picture; plans and models; refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowtrain.cli.main import make_app
from flowtrain.cli.simulate import VARIANTS
from flowtrain.errors import ConfigError, PlanError

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/emoji/model"
CPU = ("--device", "cpu", "--devices-per-node", 4, "--dtype", "float32", "--pack-tokens", 512, "--step-samples", 64)
SMALL = (*CPU, "--steps", 4)


def run(*arguments: object) -> None:
    make_app()(["simulate", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A scan of 200 rows: 40 to 130 tokens of text, none to three images of 16 tokens."""
    path = tmp_path / "rows.jsonl.sizes.jsonl"
    rows = []
    for number in range(200):
        images = [[32, 32, 16, 64]] * (number % 4)
        text, vision = 40 + 7 * (number % 13), 16 * len(images)
        sizes = {"text_tokens": text, "vision_tokens": vision, "trained_tokens": text // 2, "patches": 4 * vision}
        rows.append({"row": number, "id": f"row-{number}", **sizes, "images": images})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_model_as_text_data_and_picture(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "out.json", tmp_path / "timeline.png"
    run(MODEL, "--trace", trace, *SMALL, "--placement", "disaggregated", "--json", data, "--picture", picture)
    text = capsys.readouterr().out
    for word in ("samples/s", "MFU", "consumers starved", "producer 0", "consumer 0", "note: pool:"):
        assert word in text
    result: dict[str, Any] = json.loads(data.read_text())
    assert result["devices"] <= 4
    assert [step["step"] for step in result["steps"]] == [1, 2, 3, 4]
    assert sum(step["rows"] for step in result["steps"]) == 4 * 64
    assert result["mfu_percent"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["flow", "disaggregated", "monolithic"])
def test_every_mode_trainable_and_frozen(tmp_path: Path, trace: Path, mode: str) -> None:
    rates = {}
    for frozen in ((), ("--freeze", "encoder", "--freeze", "projector")):
        data = tmp_path / f"{len(frozen)}.json"
        run(MODEL, "--trace", trace, *SMALL, "--mode", mode, *frozen, "--json", data)
        result = json.loads(data.read_text())
        rates[len(frozen)] = result["samples_per_second"]
        assert result["control_percent"] < 5
    assert rates[4] > rates[0]


def test_a_config_says_what_attention_costs_its_packs(tmp_path: Path, trace: Path) -> None:
    data, tokens = tmp_path / "out.json", []
    for share in (1.0, 0.01):
        changed = ("--set", f"packing.attention_efficiency={share}", "--set", "train.step={packs: 4}")
        devices = ("--device", "cpu", "--devices-per-node", 4, "--steps", 4)
        run(ROOT / "examples/emoji/emoji.yaml", "--trace", trace, *devices, *changed, "--json", data)
        tokens.append([step["text_tokens"] for step in json.loads(data.read_text())["steps"]])
    assert tokens[0] != tokens[1]


def test_a_written_plan_is_played_as_it_stands(tmp_path: Path, trace: Path) -> None:
    plan, both = tmp_path / "plan.yaml", []
    asked = [
        "plan",
        str(MODEL),
        "--data",
        str(trace),
        *map(str, CPU),
        "--placement",
        "disaggregated",
        "--out",
        str(plan),
    ]
    make_app()(asked, standalone_mode=False)
    for arguments in ((MODEL, *CPU, "--placement", "disaggregated"), (plan, "--dtype", "float32")):
        run(*arguments, "--trace", trace, "--steps", 4, "--json", tmp_path / "out.json")
        both.append(json.loads((tmp_path / "out.json").read_text()))
    assert both[0]["layouts"] == both[1]["layouts"]
    assert both[0]["samples_per_second"] == pytest.approx(both[1]["samples_per_second"])


def test_sensitivity_is_told_for_each_variant(tmp_path: Path, trace: Path) -> None:
    data = tmp_path / "out.json"
    saving = ("--save-every", 1, "--save-seconds", 0, "--restart-seconds", 0.1)
    run(MODEL, "--trace", trace, *SMALL, "--sensitivity", *saving, "--json", data)
    effects = json.loads(data.read_text())["sensitivity_percent"]
    assert tuple(effects) == VARIANTS
    assert effects["half as many images"] > 0 > effects["half as many again"]
    assert effects["jitter 0.3"] < 0
    assert effects["ten failures"] < effects["three failures"] <= 0


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        (("--mode", "other"), ConfigError, "--mode other: choose among flow, disaggregated, monolithic"),
        (("--exchange", "other"), ConfigError, "--exchange other: choose among pool"),
        (("--packing", "other"), ConfigError, "--packing other: choose among"),
        (("--policy", "other"), ConfigError, "--policy other: choose among"),
        (("--segment-bytes", 1000), PlanError, "a segment of the pool has 1000 bytes and"),
        (
            ("--freeze", "encoder", "--freeze", "projector", "--freeze", "backbone"),
            ConfigError,
            "--freeze names every module",
        ),
    ],
)
def test_what_cannot_be_played_is_told(
    trace: Path, arguments: tuple[object, ...], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        run(MODEL, "--trace", trace, *SMALL, *arguments)


def test_sizes_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --trace FILE, or run `flowtrain data scan`"):
        run(MODEL, *SMALL)
    with pytest.raises(ConfigError, match="does not exist"):
        run(MODEL, *SMALL, "--trace", tmp_path / "missing.parquet")


def test_a_plan_that_says_too_little_is_told(tmp_path: Path, trace: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("placement: disaggregated\nproducers: {layout: r1}\nconsumers: {layout: r1}\n")
    with pytest.raises(ConfigError, match="`expected` does not say the modules of a plan"):
        run(plan, "--trace", trace)


def test_neither_torch_nor_ray_is_loaded(trace: Path) -> None:
    arguments = ["simulate", str(MODEL), "--trace", str(trace), *map(str, SMALL)]
    code = (
        "import sys\nfrom flowtrain.cli.main import make_app\n"
        f"make_app()({arguments!r}, standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys(), 'something heavy was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
