"""The Grafana dashboard and the alerts name metrics that the one table has, with the labels that they have there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind
from flowtrain.telemetry.sinks.prometheus import prometheus_name

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\bflowtrain_\w+")
TARGETS = {"job", "instance"}


def known() -> dict[str, set[str]]:
    """What a run serves: name → labels."""
    served = {"flowtrain_step": {"run"}, "flowtrain_ended": {"run"}}
    for metric in METRICS:
        if metric.kind is not Kind.FACT:
            name = prometheus_name(metric) + ("_total" if metric.kind is Kind.COUNTER else "")
            served[name] = {"run"} | ({metric.label} if metric.label else set())
    return served


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana/flowtrain.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_every_panel_shows_a_metric_of_the_table_by_its_labels() -> None:
    served = known()
    assert len(panels()) > 12
    for panel in panels():
        for target in panel["targets"]:
            [name] = NAME.findall(target["expr"])
            assert name in served, f"{panel['title']} shows {name}, which no run serves"
            assert 'run=~"$run", instance=~"$instance"' in target["expr"], panel["title"]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= served[name], panel["title"]


def test_what_the_dashboard_is_for_is_on_it() -> None:
    shown = {name for panel in panels() for target in panel["targets"] for name in NAME.findall(target["expr"])}
    wanted = ("loss_metrics", "grad_norm_by_module", "throughput", "mfu_encoder", "mfu_backbone", "mfu_llm_only")
    wanted += ("production", "consumption", "pool_occupancy", "starvation", "stall", "imbalance", "load_by_rank")
    wanted += ("device_",)
    assert [word for word in wanted if not any(word in name for name in shown)] == []


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_every_alert_is_of_metrics_of_the_table_and_says_what_to_do() -> None:
    served = known()
    [group] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    assert len(group["rules"]) == 6
    docs = (DEPLOY.parent / "docs/deployment.md").read_text()
    for rule in group["rules"]:
        names = NAME.findall(rule["expr"])
        assert names
        assert [name for name in names if name not in served] == [], rule["alert"]
        assert rule["annotations"]["description"], rule["alert"]
        assert f"`{rule['alert']}`" in docs, f"docs/deployment.md does not tell of {rule['alert']}"
