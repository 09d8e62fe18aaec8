"""Run files, spans, traces and the fatal record: what is on disk after any end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ConfigError, DataError, Interrupted, LostProcessError, PeerError, PlanError
from flowtrain.telemetry.fatal import clear_error, read_error, write_error
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.run_files import JsonLines, RunFiles, finite
from flowtrain.telemetry.spans import SPAN_BYTES, Spans, read_last_span


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(run_dir: Path, steps: range, resume_step: int | None) -> None:
    with RunFiles(run_dir, resume_step) as files:
        files.decision(steps.start, "plan", plan={"readers": 1})
        for step in steps:
            files.metrics.write({"step": step, "loss": step / 3})
            for rank in range(2):
                files.samples(step, rank, 0, [f"row-{step}-{rank}"])


def test_a_resumed_run_leaves_the_files_of_one_never_stopped(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", range(1, 9), None)
    write_run(tmp_path / "parts", range(1, 6), None)
    write_run(tmp_path / "parts", range(4, 9), 3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()
    assert [record["step"] for record in records(tmp_path / "parts" / "decisions.jsonl")] == [1, 4]


def test_a_fresh_run_replaces_what_is_there(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 4), None)
    write_run(tmp_path, range(1, 2), None)
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == [1]


@given(cut=st.integers(0, 80), resume=st.integers(0, 5))
def test_a_torn_last_line_is_dropped_on_resume(cut: int, resume: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    content = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))
    path.write_text(content[: min(cut, len(content))])
    JsonLines(path, resume).close()
    whole = min(cut, len(content)) // len('{"step": 1}\n')
    torn_but_complete = min(cut, len(content)) % len('{"step": 1}\n') == len('{"step": 1}')
    assert [record["step"] for record in records(path)] == list(range(1, min(whole + torn_but_complete, resume) + 1))


@pytest.mark.parametrize("broken", [b"nonsense", b"\xff\xfe\x00", b"\x00" * 12, b'{"step": 1e999}', b"[" * 100_000])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2 is not a record"):
        JsonLines(path, 2)


def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    with RunFiles(tmp_path, None) as files:
        files.metrics.write({"step": 1, "loss": float("nan"), "deep": [float("inf"), {"x": 1.5}]})
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "deep": [None, {"x": 1.5}]}]
    assert finite((1, "a", None, True)) == [1, "a", None, True]


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, None)
    files.metrics.write({"step": 1})
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1}]
    files.close()
    files.close()


def test_a_file_that_cannot_be_opened_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(PlanError, match=r"cannot write .*metrics.jsonl.*change run.dir"):
        RunFiles(tmp_path, None)


def test_a_file_that_breaks_later_warns_once_and_is_given_up(tmp_path: Path) -> None:
    warnings: list[str] = []
    lines = JsonLines(tmp_path / "metrics.jsonl", None, warnings.append)
    assert lines._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, lines._file.fileno())
    os.close(full)
    for step in range(3):
        lines.write({"step": step})
    lines.close()
    assert len(warnings) == 1
    assert "No space left on device; nothing more is written to it" in warnings[0]


def test_the_summary_is_whole_or_old(tmp_path: Path) -> None:
    with RunFiles(tmp_path, None) as files:
        files.summary({"exit": 0, "wall_s": 1.5})
        files.summary({"exit": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    (tmp_path / "file.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


# --- spans ------------------------------------------------------------------------------------------------------------


def test_a_pipe_is_written_into_and_a_link_stays(tmp_path: Path) -> None:
    """`--json /dev/stdout`: a rename would put a file in the place of the device."""
    reading, writing = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/dev/fd/{writing}")
    write_atomic(link, "told\n")
    assert os.read(reading, 100) == b"told\n"
    assert link.is_symlink()
    os.close(reading)
    os.close(writing)
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "one.json")
    for text in ("first", "second"):
        write_atomic(link, text)
        assert link.is_symlink()
        assert (tmp_path / "one.json").read_text() == text


def test_open_spans_nest_and_end(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "consumer-0"
    spans = Spans(path)
    assert read_last_span(path) is None
    with spans("train"):
        assert read_last_span(path) == "train"
        with spans("collective"):
            assert read_last_span(path) == "train > collective"
        assert read_last_span(path) == "train"
    assert read_last_span(path) is None
    with pytest.raises(ZeroDivisionError), spans("save"):
        1 / 0  # noqa: B018
    assert read_last_span(path) is None
    spans.close()
    assert path.stat().st_size == SPAN_BYTES


def test_a_long_name_keeps_its_innermost_end(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "file")
    with spans("x" * 400), spans("inner"):
        found = read_last_span(tmp_path / "file")
        assert found is not None
        assert found.endswith("x > inner")
        assert len(found) <= SPAN_BYTES
    spans.close()


def test_a_missing_or_short_file_has_no_span(tmp_path: Path) -> None:
    assert read_last_span(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"x")
    assert read_last_span(tmp_path / "short") is None


@pytest.fixture
def full_disk(file_system: Callable[[str], Path]) -> Path:
    folder = file_system("8k")
    (folder / "others").write_bytes(b"x" * 8192)
    return folder


def _enter_a_span(path: str) -> None:
    with pytest.raises(PlanError, match=r"No space left on device; free disk space or change run.dir"):
        Spans(Path(path))("train").__enter__()


def test_a_full_disk_is_told_and_does_not_end_the_process_by_sigbus(full_disk: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_enter_a_span, args=(str(full_disk / "producer-0"),))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


def _die_in_a_span(path: str) -> None:
    with Spans(Path(path))("reduce"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_open_span_outlives_a_killed_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_in_a_span, args=(str(tmp_path / "file"),))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert read_last_span(tmp_path / "file") == "reduce"


# --- fatal ------------------------------------------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_understood_error_is_one_line_that_names_its_traceback(tmp_path: Path) -> None:
    write_error(tmp_path, raised(DataError("row 7 has no image:\n  set data.on_bad_sample: skip")))
    record = read_error(tmp_path)
    assert record is not None
    trace = tmp_path / "error-traceback.txt"
    assert record.exit_code == 3
    assert record.line == f"row 7 has no image: set data.on_bad_sample: skip (traceback: {trace})"
    assert record.traceback_file == str(trace)
    assert "DataError" in trace.read_text()
    assert "in raised" in trace.read_text()


def test_any_other_error_is_our_bug(tmp_path: Path) -> None:
    write_error(tmp_path, raised(KeyError("x")))
    record = read_error(tmp_path)
    assert record is not None
    assert record.exit_code == 1
    assert record.line.startswith("internal error KeyError at ")
    assert "test_telemetry_files.py:" in record.line


@pytest.mark.parametrize(("error", "code"), [(Interrupted("stopped"), 130), (KeyboardInterrupt(), 130)])
def test_an_interrupt_needs_no_traceback(error: BaseException, code: int, tmp_path: Path) -> None:
    write_error(tmp_path, raised(error))
    record = read_error(tmp_path)
    assert record is not None
    assert (record.exit_code, record.traceback_file) == (code, None)
    assert record.line.startswith("stopped")


def test_the_first_true_cause_stays(tmp_path: Path) -> None:
    write_error(tmp_path, raised(PeerError("collective failed")))
    write_error(tmp_path, raised(LostProcessError("producer 0 was killed")))
    write_error(tmp_path, raised(PlanError("echo")))
    record = read_error(tmp_path)
    assert record is not None
    assert record.line.startswith("producer 0 was killed")
    assert "LostProcessError" in (tmp_path / "error-traceback.txt").read_text()


def test_what_an_earlier_process_left_is_replaced(tmp_path: Path) -> None:
    write_error(tmp_path, raised(PlanError("old")))
    path = tmp_path / "error.json"
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
    write_error(tmp_path, raised(PlanError("new")))
    record = read_error(tmp_path)
    assert record is not None
    assert record.line.startswith("new")
    clear_error(tmp_path)
    assert read_error(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_does_not_hide_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    write_error(tmp_path / "file", raised(PlanError("the pool is too small")))
    assert capsys.readouterr().err.splitlines()[-1] == "the pool is too small"
