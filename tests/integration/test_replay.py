"""A run composed by measured times is repeated bit for bit by its log, whatever the times are (contract C1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration_runs import Train, lines, losses, samples

from flowtrain.errors import ConfigError

COMMON = (
    "consumers.num=2",
    "train.step={packs: 4}",
    "train.max_steps=11",
    "packing={max_tokens: 256, lookahead: 2, cost: fitted}",
    "data.eval=null",
    "checkpoint.every=10",
)


def costs(run_dir: Path) -> list[dict[str, Any]]:
    """The cost entries of the log, without what is told of the fit behind them."""
    told = ("calls", "error")
    entries = [entry for entry in lines(run_dir / "decisions.jsonl") if entry["kind"] == "cost"]
    return [{key: value for key, value in entry.items() if key not in told} for entry in entries]


@pytest.mark.timeout(300)
def test_a_fitted_run_is_repeated_by_its_log(train: Train, copy_of: Callable[[Path, str], Path]) -> None:
    # Consumers that sleep before each pack: the fit sees a large fixed part, which the FLOPs model does not know.
    fitted = train("emoji", *COMMON, "debug.delays={consumer_pack_ms: {0: 100, 1: 100}}", name="fitted")
    found = costs(fitted)
    assert [entry["source"] for entry in found][:2] == ["model", "fitted"]
    assert all(1 < entry["step"] <= 11 for entry in found[1:])

    log = fitted / "decisions.jsonl"
    # Other delays, and nothing measured: `cost` of the config has no say.
    again = train("emoji", *COMMON, "debug.delays={producer_unit_ms: {0: 5}}", name="again", replay=log)
    assert samples(again) == samples(fitted)
    assert losses(again) == losses(fitted)
    assert costs(again) == found

    by_model = train("emoji", *COMMON, "packing.cost=model", name="model")
    assert samples(by_model) != samples(fitted), "the fit changed nothing"

    # From a checkpoint on, with the log and without: the log repeats, the run's own fit goes on.
    checkpoint = fitted / "checkpoints" / "step-10"
    resumed = copy_of(fitted, "resumed")
    train("emoji", *COMMON, name="resumed", resume=checkpoint, replay=log)
    assert samples(resumed) == samples(fitted)
    assert losses(resumed) == losses(fitted)
    on_its_own = copy_of(fitted, "own")
    train("emoji", *COMMON, name="own", resume=checkpoint)
    held = [entry for entry in found if entry["step"] <= 10][-1]
    entry = next(entry for entry in costs(on_its_own) if entry["step"] == 11)
    assert {**entry, "step": 0} == {**held, "step": 0}, "the cost model of the checkpoint goes on"

    for changed, told in (
        ("run.seed=1", r"seed \(0 there, 1 here\)"),
        ("packing.max_tokens=640", r"max_tokens \(256 there, 640 here\)"),
    ):
        with pytest.raises(ConfigError, match=told):
            train("emoji", *COMMON, changed, name="refused", replay=log)
