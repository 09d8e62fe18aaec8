"""Bad input from the command line, in one process: a run with nothing to train ends and says why (D05 D07 D25)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from integration_runs import EXAMPLES, Train
from launched import Launch
from PIL import Image

from flowtrain.errors import PlanError
from flowtrain.pool.pages import huge_pages_free

COLOCATED = ("mode=monolithic", "producers.threads=1", "train.step={samples: 4}", "train.max_steps=2")
NUM_ROWS = 16


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of one whole picture each, `0.jpeg`, which a test may damage."""
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "0.jpeg")
    turns = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "7"}]
    lines = [
        json.dumps({"id": f"row-{number}", "images": ["0.jpeg"], "messages": turns}) + "\n"
        for number in range(NUM_ROWS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    return tmp_path / "rows.jsonl"


def refused(launch: Launch, code: int, *words: str) -> None:
    assert launch.end(within=60) == code, launch.err
    assert all(word in launch.last_line for word in words), launch.last_line
    assert "Traceback" not in launch.err


def skipped(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit"] == 3
    assert summary["rows"]["trained"] == 0
    return {reason: rows["count"] for reason, rows in summary["rows"]["skipped"].items()}


def test_a_run_whose_images_are_all_missing_ends_even_where_any_share_may_be_bad(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "0.jpeg").unlink()
    with Launch("digits", tmp_path / "run", *COLOCATED, f"data.train={rows}", "data.max_bad_share=1.0") as launch:
        refused(
            launch, 3, f"none of the {NUM_ROWS} rows can be used", "image-missing", "0.jpeg", "flowtrain data check"
        )
    assert skipped(tmp_path / "run") == {"image-missing": NUM_ROWS}


def test_a_run_whose_images_all_fail_at_decode_ends(rows: Path, tmp_path: Path) -> None:
    picture = tmp_path / "0.jpeg"
    picture.write_bytes(picture.read_bytes()[:-300])
    with Launch("digits", tmp_path / "run", *COLOCATED, f"data.train={rows}", "train.max_steps=9") as launch:
        refused(launch, 3, f"of the first {NUM_ROWS} rows cannot be used", "image-undecodable", "0.jpeg")
        assert all(record["loss_metrics/global_avg_loss"] is None for record in launch.metrics())
    assert skipped(tmp_path / "run").keys() == {"image-undecodable"}
    assert not (tmp_path / "run/export").exists()


def test_a_finished_run_is_not_resumed_with_fewer_steps(rows: Path, tmp_path: Path) -> None:
    overrides = (*COLOCATED, f"data.train={rows}")
    with Launch("digits", tmp_path / "run", *overrides) as launch:
        assert launch.end(within=60) == 0, launch.err
    with Launch("digits", tmp_path / "run", *overrides, "train.max_steps=1", resume="latest") as launch:
        refused(launch, 2, "the run has 1 steps", "at step 2", "train.max_steps")
        assert launch.checkpoints() == [2]


@pytest.fixture
def other_family(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(EXAMPLES / "digits/model", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "other_vl"}))
    return folder


def test_another_model_family_is_refused_before_a_run_folder_is_made(other_family: Path, tmp_path: Path) -> None:
    with Launch("digits", tmp_path / "run", *COLOCATED, f"model.path={other_family}") as launch:
        refused(launch, 2, "'other_vl'", "supported:", "qwen3_vl")
    assert not (tmp_path / "run").exists()


def test_epochs_of_packs_are_refused_before_a_run_folder_is_made(tmp_path: Path) -> None:
    overrides = (*COLOCATED[:2], "train.step={packs: 2}", "train.max_steps=null", "train.epochs=2")
    with Launch("digits", tmp_path / "run", *overrides) as launch:
        refused(launch, 2, "train.step.packs needs train.max_steps")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(huge_pages_free() > 0, reason="this machine has huge pages reserved")
def test_a_segment_whose_pages_are_not_there_ends_the_start(train: Train) -> None:
    """Pages are made beside the imports; what fails there is told by the start."""
    with pytest.raises(PlanError, match=r"raise vm\.nr_hugepages"):
        train("digits", "mode=monolithic", "pool.huge_pages=explicit", "train.max_steps=1")
