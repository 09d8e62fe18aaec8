"""Where a launch runs, what a job's log says, and a dashboard that refuses, is silent or is not there."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flowtrain.cli import failure
from flowtrain.cli.job import JobLog, address_override, as_job, check_visible, environment_of, joined
from flowtrain.cli.main import make_app
from flowtrain.config.loading import load_config
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.runtime import jobs as jobs_module
from flowtrain.runtime.jobs import Jobs, cluster_token
from flowtrain.runtime.silence import silence

DIGITS = Path(__file__).parents[3] / "examples/digits/digits.yaml"
URL, HEAD = "http://head:8265", "head:6379"
RAY_JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_ADDRESS": HEAD}
SLURM = {"SLURM_JOB_ID": "7"}


def config_at(*overrides: str) -> Config:
    return load_config(DIGITS, overrides).config


@pytest.mark.parametrize(
    ("option", "environment", "sent", "address"),
    [
        (None, {}, False, None),
        (URL, {}, True, URL),
        (None, {"RAY_ADDRESS": URL}, True, URL),
        (HEAD, {"RAY_ADDRESS": URL}, False, HEAD),
        ("auto", {}, False, "auto"),
        (None, RAY_JOB, False, HEAD),
        (URL, RAY_JOB, False, "auto"),
        ("HTTP://head:8265", {}, True, "HTTP://head:8265"),
        (URL, SLURM, False, "auto"),
        (None, SLURM, False, None),
    ],
)
def test_where_a_launch_runs(option: str | None, environment: dict[str, str], sent: bool, address: str | None) -> None:
    config = config_at(*address_override(option, environment))
    assert as_job(config, environment) is sent
    assert (config if sent else joined(config, environment)).cluster.address == address


def test_an_override_of_the_user_beats_the_environment() -> None:
    config = config_at(*address_override(None, {"RAY_ADDRESS": URL}), "cluster.address=null")
    assert config.cluster.address is None


def test_a_ray_client_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="ray://head:10001 cannot carry a run: give the dashboard's URL"):
        as_job(config_at("cluster.address=ray://head:10001"), {})


def test_variables_of_a_job() -> None:
    assert environment_of(["A=1=2", "B", "C="], {"B": "here"}) == {"A": "1=2", "B": "here", "C": ""}
    with pytest.raises(ConfigError, match="--env GONE"):
        environment_of(["GONE"], {})


def test_a_node_without_the_data_is_named(tmp_path: Path) -> None:
    config = config_at()
    check_visible(config)
    data = config.data.model_copy(update={"train": tmp_path / "absent.parquet"})
    with pytest.raises(PlanError, match=rf"{socket.gethostname()} .* does not have .*absent.parquet \(data.train\)"):
        check_visible(config.model_copy(update={"data": data}))


# --- the log ----------------------------------------------------------------------------------------------------------


def test_a_log_is_shown_up_to_the_record_of_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a command writes as a job is what a follower reads, however the log is cut into pieces."""
    monkeypatch.setenv(failure.JOB, "1")
    failure.last_line("row 7: broken", 3, {"steps": 2})
    text = "step 1\nstep 2\n" + capsys.readouterr().err
    for size in (1, 7, len(text)):
        log = JobLog()
        shown = "".join(log.feed(text[at : at + size]) for at in range(0, len(text), size)) + log.rest()
        assert shown == "step 1\nstep 2\n"
        assert log.end == {"exit": 3, "line": "row 7: broken", "result": {"steps": 2}}
    log = JobLog()
    assert log.feed("half a line" + text.removeprefix("step 1\nstep 2\n")) == "half a line\n"
    assert log.end is not None
    own = JobLog()
    for line in (
        failure.JOB_END,
        f"{failure.JOB_END}[1]",
        f"{failure.JOB_END}{{",
        f"say {failure.JOB_END}{{}}",
    ):
        assert own.feed(f"{line}\n") == f"{line}\n", "words of another program, or a torn record"
    assert own.end is None
    cut = JobLog()
    assert (cut.feed("step 1\nstep"), cut.rest(), cut.end) == ("step 1\n", "step\n", None), "a killed job"
    assert text.endswith("row 7: broken\n"), "who reads the log itself finds the line at its end"


def test_a_command_that_is_no_job_writes_no_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(failure.JOB, raising=False)
    failure.last_line("row 7: broken", 3)
    assert capsys.readouterr().err == "row 7: broken\n"


# --- the dashboard ----------------------------------------------------------------------------------------------------


def test_the_token_is_found_where_ray_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of-home\n")
    assert cluster_token() == "of-home"
    (tmp_path / "file").write_text("of-path")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    assert cluster_token() == "of-path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-environment")
    assert cluster_token() == "of-environment"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH: .*absent cannot be read"):
        cluster_token()
    (tmp_path / "absent").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="absent holds no token"):
        cluster_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "two\nlines")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN holds no token"):
        cluster_token()


Serve = Callable[[int], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(403)`: the URL of a dashboard that tells its version and answers everything else so."""
    servers: list[HTTPServer] = []

    def start(status: int) -> str:
        class Dashboard(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = self.path == "/api/version" and status == 404
                self.send_response(200 if told else status)
                self.end_headers()
                self.wfile.write(b'{"ray_version": "2.60.0"}' if told else b'"Job x does not exist"')

            def log_message(self, *words: object) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Dashboard)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_dashboard_that_refuses_the_user(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(PlanError, match=r"refuses this user \(the token given is not the cluster's\)"):
        Jobs(serve(403))


def test_a_job_that_is_not_there(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="has no job x"):
        Jobs(serve(404)).job("x")


def test_a_page_of_a_dashboard_is_as_good_as_its_address(serve: Serve) -> None:
    url = serve(404)
    assert [Jobs(f"{url}{page}").address for page in ("", "/", "/#/jobs")] == [url] * 3


def test_a_server_that_is_no_dashboard_of_ray(serve: Serve) -> None:
    with pytest.raises(PlanError, match=r"what answers at .* is no Ray dashboard"):
        Jobs(serve(200))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("launch", str(DIGITS), "--address", URL, "--dashboard"), "flowtrain dashboard RUN_DIR"),
        (("launch", str(DIGITS), "--address", URL, "--no-wait", "--json", "x.json"), "--json .* --no-wait"),
        (("launch", str(DIGITS), "--no-wait"), r"give the dashboard of a cluster \(--address URL\)"),
        (("jobs", "list"), "there is no address: .*RAY_ADDRESS"),
        (("jobs", "list", "--address", HEAD), f"{HEAD} is no dashboard"),
    ],
)
def test_what_does_not_go_together_is_told(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=told):
        make_app()(words, standalone_mode=False)


def test_a_path_that_the_user_may_not_use_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.report(PermissionError(13, "Permission denied", "/locked/run")) == 2
    assert capsys.readouterr().err.startswith("/locked/run: Permission denied; give a path that you may use")


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_dashboard_that_has_ended_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    url = f"http://127.0.0.1:{closed_port()}"
    began = time.monotonic()
    with pytest.raises(PlanError, match=f"nothing listens at {url}, the connection is refused") as refused:
        Jobs(url)
    assert time.monotonic() - began < 10
    assert "last line" not in str(refused.value)
    port = int(url.rpartition(":")[2])
    for day, listened, end in (
        (1, port, "older"),
        (2, port, "ERROR head.py:12 -- out of disk"),
        (3, port // 10, "other"),
    ):
        log = tmp_path / f"ray/session_2026-01-0{day}_12/logs/dashboard.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"Dashboard head http address: 127.0.0.1:{listened}\n" + "started\n" * 2000 + f"{end}\n\n")
    with pytest.raises(PlanError, match=r"; the last line of .*-02_12/.* is: ERROR head\.py:12 -- out of disk$"):
        Jobs(url)


def test_each_way_to_reach_nobody_is_told_as_it_is() -> None:
    url = "http://head.invalid:8265"
    with pytest.raises(PlanError, match=r"the name head\.invalid of .* cannot be found"):
        Jobs(url)
    assert "no way to head of" in silence(URL, OSError(errno.EHOSTUNREACH, "No route to host"), 20)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            for words in (b"", b"", b"\0\0\x12\x04\0@grpc\n"):
                with server.accept()[0] as client:
                    client.sendall(words)

        threading.Thread(target=hang_up, daemon=True).start()
        here = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PlanError, match=f"the connection to http://{here} broke off"):
            Jobs(f"http://{here}")
        with pytest.raises(PlanError, match=r"does not speak TLS as expected|broke off"):
            Jobs(f"https://{here}")
        with pytest.raises(PlanError, match=f"what answers at http://{here} does not speak HTTP"):
            Jobs(f"http://{here}")


@pytest.mark.parametrize(
    "url", ["http://", "http://:8265", "http://head:99999", "http://head:port", "http://[::1", "http://a..b:1"]
)
def test_what_is_no_url_is_told_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no URL of a dashboard: write http://HEAD:8265"):
        Jobs(url)


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:dashboard", "head:0", "head:65536", "AUTO"])
def test_an_address_that_is_of_no_kind_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.address: {address} lacks a port: give HOST:PORT"):
        as_job(config_at(f"cluster.address='{address}'"), {})


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:1", "[::1]:65535"])
def test_addresses_of_a_head_are_well(address: str) -> None:
    assert not as_job(config_at(f"cluster.address='{address}'"), {})


def test_a_dashboard_that_never_answers_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PlanError, match=r"within 0\.2 s"):
        Jobs(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_proxy_that_is_in_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(PlanError, match=r"proxy of HTTP_PROXY .*: set NO_PROXY=head\.example"):
        Jobs("http://head.example:8265")
