"""The page in a real browser, beside a run that trains: every chart, every update, every request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launch, until

from benchmarks.chromium import Chromium, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

HOSTILE = "<img src=x onerror=alert(1)>"
DRAWN = "document.querySelectorAll('[data-chart] .plot canvas').length"
SHOW_ALL = """document.querySelectorAll('[data-chart] .plot').forEach((plot) => {
    plot.card.visible = true; plot.card.update(); })"""
VALUES = """Object.fromEntries([...document.querySelectorAll('[data-chart] .keys button')].map(
    (key) => [key.dataset.name, key.querySelector('data').getAttribute('value')]))"""
EMPTY = """[...document.querySelectorAll('[data-chart]')].filter((card) => card.querySelector('.empty'))
    .map((card) => card.dataset.chart)"""
FIRST = """document.querySelector('[data-chart=loss] .plot')?.card?.runs?.[0]?.columns
    .series['loss_metrics/global_avg_loss']?.[0]?.[0]"""


@pytest.fixture
def page() -> Iterator[Chromium]:
    with Chromium() as page:
        yield page


def newest(run_dir: Path) -> dict[str, Any]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    found: dict[str, Any] = json.loads([line for line in lines if line.endswith("\n")][-1])
    return found


def differing(page: Chromium, record: dict[str, Any]) -> list[str]:
    """Metrics of the charts whose value in the page is not that of this record."""
    shown = page.value(VALUES)
    assert len(shown) > 20
    return [name for name, value in shown.items() if (float(value) if value else None) != record[name]]


def test_every_chart_of_a_live_run_and_of_its_end(page: Chromium, tmp_path: Path) -> None:
    steps = 14
    with Launch(
        "digits",
        tmp_path / "run",
        "allocation.replan=propose",
        "run.trace=true",
        f"train.max_steps={steps}",
        "debug.delays.consumer_pack_ms={0: 250}",
        dashboard=True,
    ) as launch:
        launch.until_step(2)
        (address,) = re.findall(r"^dashboard: (\S+)$", launch.err, re.MULTILINE)
        page.open(address)
        page.until(f"{DRAWN} > 3", "the charts")
        before = newest(launch.run_dir)["step"]
        launch.until_step(before + 1)
        written = time.monotonic()
        page.until(f"document.querySelector('#runs').textContent.match(/step (\\d+)/)[1] > {before}", "an update")
        assert time.monotonic() - written < 2
        page.until("document.querySelector('.pill').textContent === 'done'", "the end", within=90)
        page.value(SHOW_ALL)
        until(lambda: not differing(page, newest(launch.run_dir)), "the values of the last record in the page", 5)
        assert page.value(EMPTY) == ["load", "device"], "all that one rank a side without GPUs has to tell"
        assert launch.end(within=30) == 0
        assert newest(launch.run_dir)["step"] == steps
        page.until("document.querySelector('#link').textContent.includes('not connected')", "word of the server's end")
        lost = [
            text for text in page.complaints if "ERR_CONNECTION_REFUSED" not in text and "ERR_INCOMPLETE" not in text
        ]
        assert lost == []
        assert all(request.startswith(address) for request in page.requests), page.requests


def test_a_page_that_meets_another_server_shows_what_that_one_has(page: Chromium, tmp_path: Path) -> None:
    """`flowtrain dashboard A` ends, `flowtrain dashboard B` begins on the same port, and the page is still open."""
    from flowtrain.telemetry.dashboard.serve import serving

    for name, loss in (("first", 1.0), ("second", 2.0)):
        (tmp_path / name).mkdir()
        record = {"step": 1, "loss_metrics/global_avg_loss": loss}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n{")
    shown = "document.querySelector('#runs b')?.textContent"
    with serving([tmp_path / "first"]) as address:
        page.open(address)
        page.until(f"{shown} === 'first' && {FIRST} === 1", "the first run")
        page.until("document.querySelector('#problems li')?.textContent.includes('torn')", "what cannot be read")
    page.until("document.querySelector('#link').textContent.includes('not connected')", "word of the server's end")
    with serving([tmp_path / "second", tmp_path / "first"], port=int(address.rpartition(":")[2].strip("/"))):
        page.until(f"{shown} === 'second' && {FIRST} === 2", "the run of the second server")


def test_finished_runs_over_each_other_by_keyboard_and_with_hostile_text(page: Chromium, tmp_path: Path) -> None:
    from flowtrain.telemetry.dashboard.serve import serving

    folders = [tmp_path / "one", tmp_path / f"two{HOSTILE.replace('/', '')}"]
    for scale, folder in enumerate(folders, start=1):
        folder.mkdir()
        records = [
            {"step": step, "loss_metrics/global_avg_loss": scale / step, "mfu(%)": 30.0, HOSTILE: step, "rows": 8}
            | {"throughput(tps)": 153_666.7, "grad_norm": 1.0 if step < 3000 else None}
            for step in range(1, 3001)
        ]
        records[1499]["loss_metrics/global_avg_loss"] = 77.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        skipped = {HOSTILE: {"count": 3, "ids": [HOSTILE]}}
        (folder / "summary.json").write_text(json.dumps({"exit": 3, "rows": {"skipped": skipped}}))
        (folder / "error.json").write_text(json.dumps({"exit_code": 3, "line": f"row {HOSTILE} has no image"}))
        (folder / "decisions.jsonl").write_text(json.dumps({"step": 1, "kind": HOSTILE, "what": HOSTILE}) + "\n")
    with serving(folders) as address:
        page.open(address)
        page.until("document.querySelectorAll('[data-chart=loss] canvas').length", "the loss")
        page.until("document.querySelector('[data-chart=loss] .plot').ariaLabel.includes('most 77')", "the spike")
        keys = "[...document.querySelectorAll('[data-chart=loss] .keys data')].map((one) => Number(one.value))"
        page.until(f"{keys}[1]", "the second run, which comes by a stream of its own")
        assert page.value(keys)[:2] == [pytest.approx(1 / 3000), pytest.approx(2 / 3000)]
        shown = "document.querySelector('[data-chart={}] .keys data').textContent"
        assert page.value(shown.format("throughput")) == "154 k"
        assert page.value(shown.format("grad_norm")) == "–", "not the last one that was known"
        assert page.value("document.querySelectorAll('img').length") == 1, "the page's own picture"
        alert = f"document.querySelector('#alert').textContent.split({json.dumps(HOSTILE)}).length - 1"
        page.until(f"{alert} >= 3", "both alerts")
        assert page.value(alert) == 3, "two lines and a name"
        page.value("document.querySelector('[data-chart=loss] .plot').focus()")
        page.key("Home")
        assert page.value(keys)[0] == page.value(FIRST)
        assert page.value("document.querySelector('[data-chart=loss] .sr').textContent").startswith("step ")
        page.value("document.querySelector('[data-chart=loss] .head button').click()")
        assert page.value("document.querySelectorAll('[data-chart=loss] table tbody tr').length") == 200
        assert not page.value("document.querySelector('canvas.time').checkVisibility()"), "no trace, no empty picture"
        page.value("document.querySelector('#picker input').click()")
        page.until("document.querySelectorAll('#picked .card data[value]').length === 2", "a metric that was chosen")
        page.resize(380, 800)
        page.until("document.documentElement.scrollWidth <= 380", "a page no wider than a phone")
        assert page.complaints == []
        assert all(request.startswith(address) for request in page.requests)
