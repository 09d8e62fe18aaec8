"""The `flowtrain` command as a user starts it: exit codes, last lines, and what is left of a refused launch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def flowtrain(tmp_path: Path) -> Run:
    """Run `flowtrain ARGUMENTS` in an empty folder."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flowtrain.cli.main", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_subcommands(flowtrain: Run) -> None:
    done = flowtrain("--help")
    assert done.returncode == 0
    for name in ("launch", "config", "data", "verify", "evaluate"):
        assert f"\n  {name} " in done.stdout
        assert flowtrain(name, "--help").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("launch",),
        ("launch", "--no-such-option"),
        ("launch", "absent.yaml"),
        ("config", "absent.yaml"),
    ],
)
def test_wrong_use_is_exit_code_2_with_a_line(flowtrain: Run, arguments: tuple[str, ...]) -> None:
    done = flowtrain(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()[-1]) > 20


def test_a_wrong_key_is_the_last_line_of_stderr(flowtrain: Run, tmp_path: Path, digits: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = (digits / "digits.yaml").read_text().replace("path: model", f"path: {digits}/model").replace(" lr:", " lrr:")
    path.write_text(text.replace("data/t", f"{digits}/data/t"))
    for command in ("config", "launch"):
        done = flowtrain(command, path)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith("train.lrr: unknown key; did you mean 'lr'?")
        assert done.stderr.splitlines()[-1].startswith(f"{path}:")
    assert "Traceback" in flowtrain("config", path, "--debug").stderr


def test_config_show_and_json(flowtrain: Run, tmp_path: Path, emoji: Path) -> None:
    done = flowtrain("config", emoji / "emoji.yaml", "--show", "--set", "train.lr=1e-7", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["train"]["lr"] == 1e-7
    assert "# Peak learning rate." in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["train"]["lr"] == 1e-7


def test_dry_run_shows_config_and_plan_and_starts_nothing(flowtrain: Run, tmp_path: Path, emoji: Path) -> None:
    done = flowtrain(
        "launch",
        emoji / "emoji.yaml",
        "--dry-run",
        "--set",
        "producers.num=2",
        "--set",
        "run.dir=run",
        "--json",
        "d.json",
    )
    assert done.returncode == 0, done.stderr
    assert f"dir: {tmp_path}/run" in done.stdout
    result = json.loads((tmp_path / "d.json").read_text())
    assert len(result["plan"]["producers"]["ranks"]) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("launch", "CONFIG", "--dry-run"), ("config", "CONFIG", "--show")])
def test_looking_loads_nothing_heavy(tmp_path: Path, digits: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from flowtrain.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('loaded:', [name for name in ('torch', 'torchvision', 'ray', 'transformers') if name in sys.modules])\n"
    )
    words = [word.replace("CONFIG", str(digits / "digits.yaml")) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_resume_without_a_checkpoint_is_refused(flowtrain: Run, tmp_path: Path, digits: Path) -> None:
    for resume in ("latest", "nowhere"):
        done = flowtrain("launch", digits / "digits.yaml", "--set", "run.dir=run", "--resume", resume)
        assert done.returncode == 2
        assert f"--resume {resume}: " in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_no_run_wrote_is_refused(flowtrain: Run, tmp_path: Path, digits: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    done = flowtrain("launch", digits / "digits.yaml", "--set", "run.dir=run")
    assert done.returncode == 2
    assert "holds files that no run wrote (notes.txt)" in done.stderr.splitlines()[-1]
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
