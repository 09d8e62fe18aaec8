"""Every family that can be cut computes what a plain single-process loop computes (contracts C2, C4, C5).

Each family runs once, with one freeze setting. `FLOWTRAIN_FAMILIES=all` runs every family with every setting for five
steps and writes the largest differences to `families.json` in the working folder: the table of docs/models.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from integration_runs import Train, make_config
from tiny_families import make_family

from flowtrain.models.families import FAMILIES
from flowtrain.verify.run import check_config, compare_run, largest

FREEZE = {"all-trainable": "[]", "only-projector": "[encoder, backbone]", "encoder-frozen": "[encoder]"}
EVERYTHING = os.environ.get("FLOWTRAIN_FAMILIES") == "all"
SPREAD = [(family, list(FREEZE)[number % len(FREEZE)]) for number, family in enumerate(sorted(FAMILIES))]
CASES = [(family, freeze) for family in sorted(FAMILIES) for freeze in FREEZE] if EVERYTHING else SPREAD
STEPS = 5 if EVERYTHING else 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "freeze"), CASES)
def test_a_family_equals_plain(train: Train, tmp_path: Path, family: str, freeze: str) -> None:
    overrides = (
        f"model.path={make_family(family, tmp_path / family)}",
        f"train.freeze={FREEZE[freeze]}",
        "train.step={samples: 6}",
        f"train.max_steps={STEPS}",
        "train.epochs=null",
        "data.eval=null",
        "model.dtype=float64",
    )
    run_dir = train("emoji", *overrides, dump=True)
    outcome = compare_run(check_config(make_config("emoji", run_dir, *overrides), STEPS, "float64", run_dir))
    if EVERYTHING:
        _note(family, freeze, largest(outcome.checks), outcome.verdict.sentence)
    assert outcome.verdict.ok, outcome.verdict.sentence
    assert outcome.rows == 6 * STEPS


def _note(family: str, freeze: str, differences: dict[str, float], sentence: str) -> None:
    path = Path("families.json")
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table[f"{family} {freeze}"] = {"verdict": sentence, "largest": differences}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
