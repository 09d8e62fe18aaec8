"""What the user sees: the progress line on a terminal and elsewhere, and the tables at start."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan
from flowtrain.telemetry.console import Progress, describe_step, format_seconds
from flowtrain.telemetry.tables import ParameterRow, format_bytes, format_count, startup_tables
from flowtrain.types import Module, Role

RECORD: dict[str, Any] = {
    "step": 3,
    "loss_metrics/global_avg_loss": 1.23456,
    "throughput(tps)": 12345.6,
    "mfu(%)": 41.26,
    "pool/occupancy(%)": 62.4,
    "flow/starvation(s)": 0.125,
    "time_metrics/end_to_end(s)": 2.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_a_step() -> None:
    file = io.StringIO()
    progress = Progress("auto", 10, file)
    progress.write(RECORD)
    progress.close()
    assert file.getvalue() == (
        "step 3/10  0:14 left  loss 1.2346  12,346 tokens/s  MFU 41.3%  pool 62%  starved 0.12s\n"
    )


def test_what_is_not_known_is_left_out() -> None:
    unknown = RECORD | {"mfu(%)": None, "pool/occupancy(%)": None, "loss_metrics/global_avg_loss": None}
    assert describe_step(unknown) == "loss none  12,346 tokens/s  starved 0.12s"
    assert describe_step(RECORD | {"validation_metrics/loss": 2.0}).startswith("loss 1.2346  eval 2.0000  ")


def test_a_terminal_gets_a_bar_and_keeps_lines_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    progress = Progress("auto", 10, terminal)
    assert progress.kind == "rich"
    progress.line("before [bold]")
    progress.write(RECORD)
    progress.line("checkpoint [step-3]")
    progress.write(RECORD | {"step": 4})
    progress.close()
    progress.close()
    shown = terminal.getvalue()
    for text in ("before [bold]", "checkpoint [step-3]", "3/10", "4/10", "loss 1.2346"):
        assert text in shown


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_a_line_a_step(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    progress = Progress("auto", 10, terminal)
    progress.write(RECORD)
    assert terminal.getvalue().startswith("step 3/10 "), "as it happens, not at the end"


def test_off_shows_lines_and_no_steps() -> None:
    file = io.StringIO()
    progress = Progress("off", 10, file)
    progress.write(RECORD)
    progress.line("warning: something")
    assert file.getvalue() == "warning: something\n"


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_terminal_that_goes_away_does_not_end_the_run(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    progress = Progress(kind, 10, file)
    progress.write(RECORD)
    file.close()
    progress.write(RECORD | {"step": 4})
    progress.line("text")
    progress.close()
    assert capsys.readouterr().err.count("progress cannot be shown any more") == 1


PIPED = """
import sys
from flowtrain.telemetry.console import Progress
progress = Progress("plain", 10)
sys.stdin.readline()
for _ in range(3):
    progress.line("text")
progress.close()
sys.stdout.flush()
"""


def test_a_closed_pipe_does_not_change_the_exit_code() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PIPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        lines = process.stderr.read().splitlines()
        assert process.wait(timeout=60) == 0
    assert lines == ["warning: progress cannot be shown any more ([Errno 32] Broken pipe)"]


def test_the_time_left_follows_the_step_time() -> None:
    file = io.StringIO()
    progress = Progress("plain", 100, file)
    for step in range(1, 100):
        progress.write(RECORD | {"step": step, "time_metrics/end_to_end(s)": 1.0 if step > 1 else 50.0})
    assert file.getvalue().splitlines()[0].startswith("step 1/100  1:22:30 left")
    assert file.getvalue().splitlines()[-1].startswith("step 99/100  0:01 left")


def test_forms_of_numbers() -> None:
    assert [format_seconds(value) for value in (0, 65.4, 3725)] == ["0:00", "1:05", "1:02:05"]
    assert [format_bytes(value) for value in (12, 1536, 3 * 2**30)] == ["12 B", "1.5 KiB", "3.0 GiB"]
    assert [format_count(value) for value in (7, 1500, 2_340_000, 7e9)] == ["7", "1.50 k", "2.34 M", "7.00 B"]


def plan() -> Plan:
    def side(role: Role, *ranks: tuple[int, int]) -> ModulePlan:
        made = tuple(RankPlan(role, rank, "cpu", threads, size) for rank, (threads, size) in enumerate(ranks))
        return ModulePlan(role, Layout(dp_replicate=len(made)), made)

    producers = side(Role.PRODUCER, (1, 2**20), (1, 2**20), (2, 2**21))
    return Plan("disaggregated", producers, side(Role.CONSUMER, (4, 0)), 1, 8, 4 * 2**20)


def test_the_tables_name_every_module_process_and_the_sample() -> None:
    rows = [
        ParameterRow(Module.BACKBONE, True, 2_000_000, 8_000_000, "float32"),
        ParameterRow(Module.ENCODER, False, 1_000_000, 4_000_000, "float32"),
        ParameterRow(Module.PROJECTOR, True, 500, 2_000, "float32"),
    ]
    text = startup_tables(rows, plan(), "user: what is it? assistant: [seven]")
    lines = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in text.splitlines()]
    for expected in (
        "encoder frozen float32 1.00 M 3.8 MiB",
        "projector yes float32 500 2.0 KiB",
        "backbone yes float32 2.00 M 7.6 MiB",
        "all 2.00 M train 3.00 M 11.4 MiB",
        "producer cpu 2 1 1.0 MiB",
        "producer cpu 1 2 2.0 MiB",
        "consumer cpu 1 4",
        "pool 4.0 MiB",
        "user: what is it? assistant: [seven]",
    ):
        assert expected in lines, (expected, text)
    places = [text.index(word) for word in ("encoder ", "projector ", "backbone ")]
    assert places == sorted(places)
    assert "sample" not in startup_tables(rows, plan(), None)
