"""Modules cut over several ranks compute what a plain single-process loop computes (contract C2)."""

from __future__ import annotations

import pytest
from integration_runs import Train, make_config

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
    producers, consumers, freeze = CELLS[cell]
    overrides = (
        f"producers.layout={producers}",
        f"consumers.layout={consumers}",
        f"train.freeze={freeze}",
        "train.step={samples: 8}",
        "train.max_steps=2",
        "train.epochs=null",
        "data.eval=null",
        "model.dtype=float64",
    )
    run_dir = train("emoji", *overrides, dump=True)
    outcome = compare_run(check_config(make_config("emoji", run_dir, *overrides), 2, "float64", run_dir))
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.rows == 16
