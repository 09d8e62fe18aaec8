"""The server as a browser, an attacker and a dead client meet it."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.dashboard import server as server_module
from flowtrain.telemetry.dashboard.guard import HEADERS, cookie_name, host_allowed
from flowtrain.telemetry.dashboard.serve import serving
from flowtrain.telemetry.dashboard.view import RunView

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss_metrics/global_avg_loss": 2.5}\n')
    (folder / "link.js").symlink_to(folder.parent / "secret.txt")
    reasons = {HOSTILE: {"count": 1, "ids": [HOSTILE]}}
    (folder / "summary.json").write_text(json.dumps({"exit": 0, "rows": {"skipped": reasons}}))
    return folder


@pytest.fixture(scope="module")
def port(run_dir: Path) -> Iterator[int]:
    with serving([run_dir]) as address:
        assert urlsplit(address).hostname == "127.0.0.1"
        yield urlsplit(address).port or 0


def ask(port: int, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_page_assets_and_data_are_served_with_the_headers_that_guard_them(port: int) -> None:
    for path in ("/", "/assets/app.js", "/assets/uPlot.iife.min.js", "/api/runs", "/api/runs/0/columns?names=x"):
        status, body, headers = ask(port, path)
        assert status == 200, path
        assert body
        assert HEADERS.items() <= headers.items()
    status, body, _ = ask(port, "/")
    assert "<script>" not in body
    assert "http://" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/assets/../../secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/assets/..%5csecret.txt",
        "/assets/link.js",
        "/assets/charts.py",
        "/metrics.jsonl",
        "/assets//etc/hostname",
        "/api/runs/1/columns",
        "/api/runs/-1/columns",
        "/api/runs/0/metrics.jsonl",
        "/api/runs/99999999999999999999/timeline",
    ],
)
def test_nothing_else_is_served(port: int, path: str) -> None:
    status, body, headers = ask(port, path)
    assert status == 404
    assert "secret" not in body
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_queries_that_are_not_numbers_are_refused(port: int) -> None:
    for query in ("start=-1", "start=x", "generation=1e9", "start=" + "9" * 40, "start=%C2%B2"):
        assert ask(port, f"/api/runs/0/columns?names=a&{query}")[0] == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example"]
)
def test_a_name_that_is_not_this_machine_is_refused(port: int, host: str) -> None:
    assert ask(port, "/api/runs", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"])
def test_a_forwarded_port_is_well(port: int, host: str) -> None:
    assert ask(port, "/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: %b\r\n\r\n" % (b"x" * 9000)]
)
def test_what_is_no_http_is_refused_without_a_word_on_the_terminal(
    port: int, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request_)
        assert b"400" in client.recv(100)
    assert caplog.records == []


def test_beyond_loopback_addresses_are_well_and_domains_are_not() -> None:
    assert host_allowed("10.1.2.3:8080", "0.0.0.0")
    assert host_allowed(f"{socket.gethostname()}:8080", "0.0.0.0")
    assert not host_allowed("evil.example:8080", "0.0.0.0")
    assert not host_allowed("10.1.2.3:8080", "127.0.0.1")


def test_text_of_a_run_travels_as_json_only(port: int) -> None:
    until_read(port)
    _, body, headers = ask(port, "/api/runs")
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(body)[0]["rows"]["reasons"][0]["reason"] == HOSTILE


def state_of(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(port, "/api/runs")[1])[0]["state"]
    return found


def problem_of(port: int) -> str:
    return "; ".join(state_of(port)["problems"])


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, f"{what} in 10 s"
        time.sleep(0.01)


def until_read(port: int) -> None:
    until(lambda: state_of(port).get("step", 0) >= 1, "a record")


def test_beyond_loopback_a_token_is_asked_for(run_dir: Path) -> None:
    with serving([run_dir], host="0.0.0.0") as address:
        parts = urlsplit(address)
        assert parts.hostname == socket.gethostname().lower(), "an address that can be opened elsewhere"
        port = parts.port or 0
        token = parts.query.removeprefix("token=")
        assert len(token) >= 32
        for path in ("/", "/api/runs", "/assets/app.js", "/api/events", "/?token=wrong", "/?token=%F0%9F"):
            assert ask(port, path)[0] == 403
        status, _, headers = ask(port, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(port, "/api/runs", Cookie=cookie.split(";")[0])[0] == 200
        assert ask(port, f"//evil.example/?token={token}")[2]["Location"] == "/"
        for wrong in ("wrong", "\xff\xfe"):
            assert ask(port, "/api/runs", Cookie=f"{cookie.split('=')[0]}={wrong}")[0] == 403
    assert cookie_name(token) != cookie_name(token[:-1]), "a second server on this machine does not lock the first out"


def stream(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


def test_changes_are_told_and_a_client_that_never_reads_holds_nobody_up(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    with serving([tmp_path]) as address:
        port = urlsplit(address).port or 0
        dead = [stream(port) for _ in range(20)]
        client = stream(port)
        lines = client.makefile("rb")

        def until_step(step: int) -> None:
            while True:
                line = lines.readline()
                assert line, "the stream ended"
                if line.startswith(b"data: ") and json.loads(line[6:])[0]["step"] == step:
                    return

        until_step(1)
        began = time.monotonic()
        with metrics.open("a") as file:
            file.write('{"step": 2}\n')
        until_step(2)
        assert time.monotonic() - began < 2
        for one in (*dead, client):
            one.close()


def test_an_address_that_is_taken_and_a_folder_that_is_none_are_told(run_dir: Path, tmp_path: Path, port: int) -> None:
    with pytest.raises(PlanError, match=r"cannot listen on .*another --port"), serving([run_dir], port=port):
        pass
    for host in ("a..b", "999.1.1.1", "no such host"):
        with pytest.raises(PlanError, match=rf"cannot listen on {host}:0: \S+"), serving([run_dir], host):
            pass
    with pytest.raises(ConfigError, match="not the folder of a run"), serving([tmp_path]):
        pass


class Failing(RunView):
    """A run whose reader fails from the second look on, until `mended`."""

    mended = False

    def poll(self) -> bool:
        if self.version and not self.mended:
            raise KeyError("step")
        return super().poll()


def test_a_reader_that_fails_is_told_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(server_module, "RunView", Failing)
    monkeypatch.setattr(server_module, "AGAIN_SECONDS", 0.01)
    told: list[str] = []
    with serving([tmp_path], tell=told.append) as address:
        port = urlsplit(address).port or 0
        until_read(port)
        until(lambda: bool(state_of(port)["problems"]), "word of the failure")
        assert re.match(r"Not all can be read: internal error KeyError at \w+\.py:\d+: 'step'", problem_of(port))
        time.sleep(0.1)  # as many more failures as there are
        assert [line.split(":")[0] for line in told] == ["warning"]
        monkeypatch.setattr(Failing, "mended", True)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2}\n')
        until(lambda: state_of(port)["step"] == 2, "the reader to go on")
        until(lambda: "internal" not in problem_of(port), "the end of the word of failure")


class Silent(RunView):
    """A run on a disk that does not answer, until `answers` is set."""

    answers = threading.Event()

    def poll(self) -> bool:
        assert self.answers.wait(timeout=30)
        return super().poll()


def test_a_disk_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(server_module, "RunView", Silent)
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "PACE_SECONDS", 0.01)
    with serving([tmp_path]) as address:
        port = urlsplit(address).port or 0
        status, body, _ = ask(port, "/api/runs")
        assert status == 503
        assert "do not answer: is its disk there?" in body
        with stream(port) as client, client.makefile("rb") as lines:
            told = next(line for line in lines if b"do not answer" in line)
            assert told.startswith(b"data: ")
            Silent.answers.set()
            assert next(line for line in lines if line.startswith(b"data: ") and b"do not answer" not in line)


def test_a_server_that_dies_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(asyncio.Event, "wait", dies)
    told: list[str] = []
    ended = threading.Event()
    with serving([tmp_path], tell=told.append, ended=ended) as address:
        assert address
        assert ended.wait(timeout=10)
    (line,) = told
    assert line.startswith("warning: the dashboard has ended (OSError: [Errno 24] Too many open files)")


async def dies(event: asyncio.Event) -> bool:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
