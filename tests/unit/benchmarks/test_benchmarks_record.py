"""A benchmark's record: its form, its checks, and the exit code that `--check` asks for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.record import Check, Result, main, table


@pytest.mark.parametrize(
    ("value", "op", "limit", "ok"),
    [
        (1.0, "<=", 1.0, True),
        (1.0, "<", 1.0, False),
        (2.0, ">=", 1.0, True),
        (1.0, ">", 2.0, False),
        (1.0, "==", 1.5, False),
    ],
)
def test_check_compares_value_with_limit(value: float, op: str, limit: float, ok: bool) -> None:
    assert Check("figure", value, op, limit).to_dict() == {
        "name": "figure",
        "value": value,
        "op": op,
        "limit": limit,
        "ok": ok,
    }


def measured(options: argparse.Namespace) -> Result:
    checks = [Check("seconds", float(options.seed), "<=", 1.0)]
    return Result({"size": options.size}, [{"case": "a", "seconds": 0.123456}], checks)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=3, help="of what is measured")
    monkeypatch.setattr("sys.argv", ["python -m benchmarks.example", *arguments])
    main("example", measured, parser)


def test_record_says_what_ran_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "example.json"
    run(monkeypatch, "--seed", "1", "--json", str(file), "--check")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["benchmark"] == "example"
    assert record["seed"] == 1
    assert record["settings"] == {"size": 3}
    assert record["rows"] == [{"case": "a", "seconds": 0.123456}]
    assert record["checks"] == [{"name": "seconds", "value": 1.0, "op": "<=", "limit": 1.0, "ok": True}]
    assert record["hardware"]["cores"] >= 1
    assert {"python", "flowtrain", "torch"} <= set(record["versions"])
    assert record["commit"]


def test_a_limit_not_kept_fails_only_with_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "example.json"
    run(monkeypatch, "--seed", "2", "--json", str(file))
    with pytest.raises(SystemExit, match="benchmark example: limits not kept: seconds"):
        run(monkeypatch, "--seed", "2", "--check")
    assert json.loads(file.read_text(encoding="utf-8"))["checks"][0]["ok"] is False


def test_table_is_markdown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert table([{"case": "a", "seconds": 0.123456}]) == "| case | seconds |\n| --- | --- |\n| a | 0.1235 |"
    run(monkeypatch)
    assert "| seconds | 0 | <= | 1 | True |" in capsys.readouterr().out


def test_help_shows_the_options_of_all_and_those_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--help")
    told = capsys.readouterr().out
    assert "usage: python -m benchmarks.example" in told
    assert all(option in told for option in ("--json", "--check", "--seed", "--size"))
