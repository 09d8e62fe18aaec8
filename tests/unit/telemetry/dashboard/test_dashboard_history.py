"""What is read of a file that grows, is cut or replaced, and what is kept of many steps."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.telemetry.dashboard import tail as tail_module
from flowtrain.telemetry.dashboard.history import History
from flowtrain.telemetry.dashboard.tail import Tail


def everything(tail: Tail) -> tuple[bool, list[bytes]]:
    anew, lines = tail.read()
    while not tail.at_end:
        again, more = tail.read()
        anew, lines = anew or again, lines + more
    return anew, lines


def test_only_whole_lines_are_given_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file, tmp_path)
    assert tail.read() == (False, [])
    file.write_bytes(b"one\ntw")
    assert tail.read() == (False, [b"one"])
    assert tail.read() == (False, [])
    with file.open("ab") as end:
        end.write(b"o\nthree\n")
    assert tail.read() == (False, [b"two", b"three"])


def test_a_file_that_is_cut_replaced_or_rewritten_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file, tmp_path)
    file.write_bytes(b"1\n2\n3\n")
    tail.read()
    aside = tmp_path / "aside"
    aside.write_bytes(b"1\n2\nx\ny\n")  # what a resume does: longer than what was read, and another file
    aside.replace(file)
    assert tail.read() == (True, [b"1", b"2", b"x", b"y"])
    file.write_bytes(b"1\n")  # cut in place
    assert tail.read() == (True, [b"1"])
    file.write_bytes(b"a\nb\nc\n")  # rewritten in place, longer
    assert tail.read() == (True, [b"a", b"b", b"c"])
    file.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])


def test_a_large_file_comes_in_lumps_and_a_long_line_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [b"x" * 70_000 for _ in range(40)] + [b"y" * (3 * tail_module.CHUNK_BYTES)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    tail = Tail(file, tmp_path)
    _, first = tail.read()
    assert 0 < len(first) < len(lines)
    assert not tail.at_end
    assert first + everything(tail)[1] == lines


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "secret").write_text("secret\n")
    (root / "metrics.jsonl").symlink_to(tmp_path / "secret")
    tail = Tail(root / "metrics.jsonl", root)
    assert tail.read() == (False, [])
    assert tail.problem == "it is a link that leads out of the run's folder"


def test_what_cannot_be_read_is_told_and_what_was_read_stays(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file, tmp_path)
    file.write_bytes(b"1\n2\nto")
    assert tail.read() == (False, [b"1", b"2"])
    assert tail.torn_bytes == 2
    file.rename(tmp_path / "aside")
    file.mkdir()
    assert (tail.read(), tail.problem) == ((False, []), "Is a directory")
    file.rmdir()
    os.mkfifo(file)  # nobody writes to it: opening it must not wait
    assert (tail.read(), tail.problem) == ((False, []), "it is no regular file")
    file.unlink()
    (tmp_path / "aside").rename(file)
    with file.open("ab") as end:
        end.write(b"rn\n")
    assert (tail.read(), tail.problem, tail.torn_bytes) == ((False, [b"torn"]), None, 0)
    file.unlink()
    assert (tail.read(), tail.problem) == ((True, []), None)


def filled(values: list[float | None], most_buckets: int) -> History:
    history = History(most_buckets)
    for step, value in enumerate(values, start=1):
        history.add({"step": step, "loss": value})
    return history


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 16))
def test_buckets_keep_least_most_and_last(values: list[float | None], most_buckets: int) -> None:
    history = filled(values, most_buckets)
    found = history.columns(["loss"])
    assert len(history) <= most_buckets
    assert found["steps"][-1] == len(values)
    last, *rest = found["series"]["loss"]
    least, most = rest or (last, last)
    for number, end in enumerate(found["steps"]):
        begin = found["steps"][number - 1] if number else 0
        inside = [value for value in values[begin:end] if value is not None]
        assert least[number] == (min(inside) if inside else None)
        assert most[number] == (max(inside) if inside else None)
        assert last[number] == (inside[-1] if inside else None)


def test_a_spike_of_one_step_stays(tmp_path: Path) -> None:
    values: list[float | None] = [1.0] * 5000
    values[3210] = 99.0
    _, _, most = filled(values, 100).columns(["loss"])["series"]["loss"]
    assert most.count(99.0) == 1


def test_what_json_cannot_hold_and_what_comes_late_is_null() -> None:
    history = History()
    history.add({"step": 1, "loss": math.inf, "flag": True, "text": "a"})
    history.add({"step": 2, "loss": 1.0, "late": 2})
    history.add({"step": 2, "loss": 5.0})
    assert history.names == ["loss", "late"]
    found = history.columns(["loss", "late", "unknown"])
    assert found["series"] == {"loss": [[None, 1.0]], "late": [[None, 2]]}
    json.dumps(found, allow_nan=False)


def test_only_what_is_new_is_given_and_a_restart_is_another_generation() -> None:
    history = filled([1.0, 2.0, 3.0], 8)
    assert history.columns(["loss"], start=2)["series"] == {"loss": [[3.0]]}
    generation = history.generation
    history.restart()
    history.add({"step": 1, "loss": 7.0})
    assert history.generation != generation
    assert history.columns(["loss"])["series"] == {"loss": [[7.0]]}
