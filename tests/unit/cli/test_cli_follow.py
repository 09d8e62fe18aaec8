"""Following a job when the terminal, the dashboard or the user does not behave: exit code and last line stay right."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray_dashboard import RayDashboard

from flowtrain.cli.failure import JOB_END, raise_on_signals
from flowtrain.cli.job import follow, submit, watch
from flowtrain.errors import ConfigError, Interrupted, LostProcessError, PlanError
from flowtrain.runtime import jobs as jobs_module
from flowtrain.runtime.jobs import Jobs

pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # of Ray's client
STOPPING = "it finishes its step"


def ended(code: int, line: str | None) -> str:
    return f"{JOB_END}{json.dumps({'exit': code, 'line': line, 'result': None})}\n"


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def raising() -> Iterator[None]:
    """Signals raise, as in a command."""
    before = signal.getsignal(signal.SIGINT)
    raise_on_signals()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_reader_that_goes_away_ends_neither_the_following_nor_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`flowtrain launch … | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, RayDashboard(["step 1\n", "step 2\n", ended(3, "row 7: broken")]) as ray:
        monkeypatch.setattr(sys, "stdout", gone)
        assert follow(Jobs(ray.url), "x", STOPPING) == 3
    assert capsys.readouterr().err == "row 7: broken\n"


def test_a_request_to_stop_that_is_refused_is_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    with RayDashboard(["step 1\n"], refusals=2) as ray:

        def asked(request: str) -> None:
            if ray.requests == ["tail x"]:
                interrupt()
            elif ray.requests.count("stop x") == 3:
                ray.log.append(ended(130, "interrupted (SIGINT); step-1 is saved"))

        ray.on_request = asked
        assert follow(Jobs(ray.url), "x", STOPPING) == 130
        assert [request for request in ray.requests if request.startswith("stop")] == ["stop x"] * 3
    err = capsys.readouterr().err
    assert err.count("asking job x to stop") == 1
    assert err.endswith("interrupted (SIGINT); step-1 is saved\n")


@pytest.mark.parametrize(("refusals", "told"), [(0, "which ends by itself"), (9, "which could not be asked to stop")])
def test_the_second_interrupt_leaves_the_job_and_says_whether_it_was_asked(
    refusals: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RayDashboard(refusals=refusals) as ray:

        def asked(request: str) -> None:
            if ray.requests in (["tail x"], ["tail x", "stop x"]):
                interrupt()

        ray.on_request = asked
        assert follow(Jobs(ray.url), "x", STOPPING) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"left job x, {told}")


def test_who_interrupts_while_a_job_is_sent_hears_what_has_become_of_it() -> None:
    """The dashboard has the job and does not answer: what is there is asked to stop."""
    with RayDashboard(deaf=True) as ray:
        ray.on_request = lambda request: interrupt() if request.startswith("submit") else None
        told = r"interrupted \(SIGINT\) while job \w+ was being sent: it was asked"
        with raising(), pytest.raises(Interrupted, match=told):
            submit(ray.url, ["doctor"], None, {}, {}, 0.0)
        job = ray.requests[0].removeprefix("submit ")
        assert ray.requests == [f"submit {job}", f"stop {job}"]


def test_a_job_that_ended_without_a_record_has_the_exit_code_that_ray_saw(capsys: pytest.CaptureFixture[str]) -> None:
    with RayDashboard(["Traceback\n"]) as ray:
        ray.end(3)
        assert follow(Jobs(ray.url), "x", STOPPING) == 3
    assert "ended with exit code 3 and left no message" in capsys.readouterr().err


def test_where_no_stream_comes_through_the_log_is_asked_for_and_signals_are_heard(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A proxy in front of the dashboard that knows no websockets."""
    with RayDashboard(["step 1\n"], streams=False) as ray:

        def asked(request: str) -> None:
            if ray.requests == ["tail x"] * 2:
                ray.log.append("step 2\n")
                interrupt()
            elif request == "stop x":
                ray.log.append("step 3\n" + ended(130, "interrupted (SIGINT)"))

        ray.on_request = asked
        began = time.monotonic()
        assert follow(Jobs(ray.url), "x", STOPPING) == 130
        took = time.monotonic() - began
        assert ray.requests.count("tail x") <= 3 + 2 * took, "the dashboard is not asked without a pause"
    assert capsys.readouterr().out == "step 1\nstep 2\nstep 3\n"


def test_a_job_that_was_never_there_is_no_lost_one() -> None:
    with RayDashboard() as ray:
        ray.status = None
        with pytest.raises(ConfigError, match="has no job x"):
            watch(Jobs(ray.url), "x")
        ray.status = "RUNNING"
        pieces = Jobs(ray.url).follow("x")
        next(pieces)
        ray.status = None  # what a head that was started anew says
        with pytest.raises(LostProcessError, match=r"has no job x.*started anew"):
            list(pieces)


@pytest.mark.parametrize(("quiet", "on"), [(True, "ends by itself"), (False, "goes on")])
def test_who_stops_watching_hears_how_the_job_is(quiet: bool, on: str) -> None:
    with RayDashboard() as ray:
        ray.on_request = lambda request: interrupt() if request == "tail x" else None
        with (
            raising(),
            pytest.raises(Interrupted, match=f"job x is no longer watched and {on}; `flowtrain jobs logs x"),
        ):
            watch(Jobs(ray.url), "x", quiet)
        assert ray.requests == ["tail x"]


def test_a_job_whose_answer_was_lost_is_found_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "CALL_SECONDS", 0.5)
    with RayDashboard(deaf=True) as ray:
        _, job = submit(ray.url, ["doctor"], None, {}, {}, 0.0)
        assert ray.requests == [f"submit {job}"]
        ray.status = None
        with pytest.raises(PlanError, match=r"within 0\.5 s: [^;]*$"):
            submit(ray.url, ["doctor"], None, {}, {}, 0.0)


def test_a_cluster_that_has_just_started_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with RayDashboard(agentless=2) as ray:
        _, job = submit(ray.url, ["doctor"], None, {}, {}, 0.0)
        assert ray.requests == [f"submit {job}"] * 3
        ray.agentless = 1000
        monkeypatch.setattr(jobs_module, "AGENT_SECONDS", 0.5)
        with pytest.raises(PlanError, match=r"takes no jobs: its head node has had no agent for 0\.5 s"):
            submit(ray.url, ["doctor"], None, {}, {}, 0.0)


def test_the_last_line_of_a_killed_job_does_not_carry_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    with RayDashboard(["step 1\n"]) as ray:
        ray.end(-9)
        ray.message = "entrypoint failed with exit code -9, last available logs (truncated to 20,000 chars):\nstep 1\n"
        assert follow(Jobs(ray.url), "x", STOPPING) == 5
    assert capsys.readouterr().err == (
        "job x was lost (FAILED: entrypoint failed with exit code -9): it was killed, or its node is gone; "
        "go on from what is saved with --resume RUN_DIR\n"
    )
