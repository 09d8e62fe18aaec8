"""A real Prometheus on loopback, with the configuration of deploy/ and its times made short."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from busy import allowed
from launched import until

DEPLOY = Path(__file__).parents[2] / "deploy/prometheus"
SCRAPE_SECONDS = 0.2


def short(text: str) -> str:
    """Windows and delays of minutes as seconds: the expressions stay as they are."""
    return re.sub(r"\b(\d+)m\b", r"\1s", text)


class Prometheus:
    """Scrapes `port` of this machine; ended at the end of its block."""

    def __init__(self, folder: Path, port: int) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{int(1000 * SCRAPE_SECONDS)}ms", "evaluation_interval": "300ms"}
        config["global"]["scrape_timeout"] = config["global"]["scrape_interval"]
        [job] = [job for job in config["scrape_configs"] if job["job_name"] == "flowtrain"]
        [targets] = job["static_configs"]
        targets["targets"] = [f"127.0.0.1:{port}"]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text(short((DEPLOY / "alerts.yml").read_text()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self._address}"], stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Self:
        until(self._ready, "Prometheus to answer", allowed(30))
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=allowed(20))
        finally:
            self._process.kill()
            self._log.close()

    def ask(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer of its API."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=allowed(20)) as response:
            return json.load(response)["data"]

    def samples(self, expression: str) -> list[tuple[dict[str, str], dict[float, float]]]:
        """Every sample scraped so far of a plain selector: labels, and value by the time of its scrape."""
        found = self.ask("query", query=f"{expression}[1h]", time=time.time())["result"]
        return [(series["metric"], {at: float(value) for at, value in series["values"]}) for series in found]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def _ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            self.ask("query", query="1")
        except OSError:
            return False
        return True
