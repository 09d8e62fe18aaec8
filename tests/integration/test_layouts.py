"""Modules cut over several ranks compute what a plain single-process loop computes (contract C2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_runs import Train, make_config
from tiny_families import make_family

from flowtrain.verify.run import check_config, compare_run

CELLS = {
    "all trainable": ("r1", "f2", "[]"),
    "only projector": ("r1", "f2", "[encoder, backbone]"),
    "backbone frozen": ("r2", "f2", "[backbone]"),
    "tensor parallel": ("r2", "t2", "[]"),
    "context parallel": ("r1", "c2", "[]"),
    "tensor parallel, only projector": ("r1", "t2", "[encoder, backbone]"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_layout_equals_plain(train: Train, cell: str) -> None:
    """Eight rows a step, some without images; two ranks have other numbers of them."""
    assert_equals_plain(train, *CELLS[cell])


def test_an_encoder_cut_by_heads_equals_plain(train: Train, tmp_path: Path) -> None:
    """Two producers encode each unit together; one of them puts features and hands their gradients on."""
    assert_equals_plain(train, "t2", "r2", "[]", f"model.path={make_family('qwen3_vl', tmp_path / 'model')}")


def assert_equals_plain(train: Train, producers: str, consumers: str, freeze: str, *more: str) -> None:
    overrides = (
        f"producers.layout={producers}",
        f"consumers.layout={consumers}",
        f"train.freeze={freeze}",
        "train.step={samples: 8}",
        "train.max_steps=2",
        "train.epochs=null",
        "data.eval=null",
        "model.dtype=float64",
        *more,
    )
    run_dir = train("emoji", *overrides, dump=True)
    outcome = compare_run(check_config(make_config("emoji", run_dir, *overrides), 2, "float64", run_dir))
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.rows == 16
