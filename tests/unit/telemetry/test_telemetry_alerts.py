"""Each alert fires when its fault lasts, not before and not without it: promtool has a clock of its own."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "deploy/prometheus/alerts.yml"
SAMPLE_SECONDS = 15

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True)
class Case:
    """`series`: values every 15 s, in promtool's words; `fires`: the first minute at which `alert` does; without one
    nothing fires until minute `quiet`."""

    name: str
    series: dict[str, str]
    alert: str = ""
    fires: int | None = None
    quiet: int = 12


STEPS = {"flowtrain_step": "0+5x240", "flowtrain_time_metrics_end_to_end_seconds_total": "0+15x240"}
"""Five steps of three seconds between two samples."""

GOES, GONE = "1x240", "1x80 0x160"
CASES = (
    Case("half starved", STEPS | {"flowtrain_flow_starvation_seconds": "1.5x240"}, "FlowTrainStarvedConsumers", 6),
    Case("hardly starved", STEPS | {"flowtrain_flow_starvation_seconds": "0.5x240"}),
    Case(
        "starved for three minutes",
        STEPS | {"flowtrain_flow_starvation_seconds": "0x20 1x12 0x208"},
        quiet=20,
    ),
    Case("stalled", STEPS | {"flowtrain_flow_stall_seconds": "1.6x240"}, "FlowTrainStalledProducers", 6),
    Case("a little stalled", STEPS | {"flowtrain_flow_stall_seconds": "1.4x240"}),
    Case("slower from 30 min on", {"flowtrain_mfu_percent": "40x120 30x120"}, "FlowTrainFallingMFU", 40),
    Case("a bit slower", {"flowtrain_mfu_percent": "40x120 34x120"}, quiet=45),
    Case("lost at 20 min", {"up": GONE, "flowtrain_ended": "0x80 _x160"}, "FlowTrainLostProducers", 22),
    Case("stopped in order", {"up": GONE, "flowtrain_ended": "0x78 1x2 _x160"}, quiet=30),
    Case("runs", {"up": GOES, "flowtrain_ended": "0x240"}),
    Case("full", {"flowtrain_pool_occupancy_percent": "80x40 95x200"}, "FlowTrainPoolNearlyFull", 19),
    Case("well filled", {"flowtrain_pool_occupancy_percent": "88x240"}),
    Case("one bad step", {"flowtrain_update_nonfinite_total": "0x80 1x160"}, "FlowTrainNonFiniteLoss", 21),
    Case("no bad step", {"flowtrain_update_nonfinite_total": "1x240"}),
)


def as_test(case: Case) -> dict[str, object]:
    """At each minute the number of alerts that fire, by name; a fault heals by itself or lasts to the end."""
    target = 'job="flowtrain", instance="a:9400"'
    labels = {name: target if name == "up" else f'{target}, run="one"' for name in case.series}
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    told = [{"labels": f'{{alertname="{case.alert}"}}', "value": 1}]
    minutes = range(1, case.fires + 1 if case.fires else case.quiet)
    return {
        "name": case.name,
        "interval": f"{SAMPLE_SECONDS}s",
        "input_series": [{"series": f"{name}{{{labels[name]}}}", "values": case.series[name]} for name in case.series],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{minute}m", "exp_samples": told if minute == case.fires else []}
            for minute in minutes
        ],
    }


def test_every_alert_fires_when_its_fault_lasts_and_only_then(tmp_path: Path) -> None:
    rules = {rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    assert {case.alert for case in CASES if case.alert} == rules
    file = tmp_path / "test.yml"
    tests = [as_test(case) for case in CASES]
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
