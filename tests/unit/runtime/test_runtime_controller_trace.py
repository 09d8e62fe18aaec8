"""What the controller writes of a run that lives."""

from pathlib import Path

import pytest

from flowtrain.runtime.controller_trace import ControllerTrace
from flowtrain.telemetry import trace as trace_module
from flowtrain.telemetry.trace import CONTROLLER, TRACE_FOLDER


def test_a_step_that_ended_can_be_seen_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "HELD_NS", 0)
    with ControllerTrace(tmp_path) as trace:
        trace.step_ended(3)
        lines = (tmp_path / TRACE_FOLDER / f"{CONTROLLER}.jsonl").read_text().splitlines()
        assert any('"m",3,' in line.replace(" ", "") for line in lines)
