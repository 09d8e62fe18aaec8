"""The pages keep their word: links lead somewhere, commands and options exist, the config page is the schema's."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    )
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(flowtrain [a-z][^`]*|scripts/[^`]*|\.ci/[^`]*)`")


@cache
def module(path: str) -> ModuleType:
    """A Python file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[loaded.__name__] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


def commands_of(page: str) -> Iterator[list[str]]:
    """Every shell command of a page, one at a time, as a list of words."""
    blocks = (match["text"] for match in FENCE.finditer(page) if match["language"] in ("bash", "sh", "console"))
    inline = INLINE.findall(FENCE.sub("", page))
    for line in (*(line for block in blocks for line in block.replace("\\\n", " ").splitlines()), *inline):
        for command in re.split(r"&&|\|\||;|\|", line.removeprefix("$ ")):
            if words := shlex.split(command, comments=True):
                yield words


def flowtrain_commands() -> list[list[str]]:
    found = {tuple(words) for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))}
    return sorted(list(words) for words in found if words[0] == "flowtrain" and len(words) > 1)


@cache
def help_of(subcommand: tuple[str, ...]) -> str:
    code = "import sys; sys.argv = ['flowtrain', *sys.argv[1:]]; from flowtrain.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *subcommand, "--help"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"`flowtrain {' '.join(subcommand)} --help` failed: {done.stderr}"
    return done.stdout


def test_pages_are_found() -> None:
    assert ROOT / "README.md" in PAGES
    assert len(PAGES) > 10
    assert len(flowtrain_commands()) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("words", flowtrain_commands(), ids=" ".join)
def test_documented_command_exists(words: list[str]) -> None:
    names = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
    subcommand = tuple(names if names[0] in ("data", "jobs") else names[:1])
    text = help_of(subcommand)
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if not re.search(rf"{option}\b", text)] == []


def test_files_named_in_commands_exist() -> None:
    named = {
        word
        for page in PAGES
        for words in commands_of(page.read_text(encoding="utf-8"))
        for word in words
        if re.match(r"(examples|scripts|\.ci)/", word)
    }
    assert named
    assert [word for word in sorted(named) if "NAME" not in word and not (ROOT / word).exists()] == []


def test_readme_has_the_two_setup_commands_on_one_line_each() -> None:
    commands = module("scripts/readme_command.py").readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(commands) == {"digits", "test"}
    for command in commands.values():
        assert "\n" not in command
        parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, timeout=10, check=False)
        assert parsed.returncode == 0
    assert commands["test"].endswith("pip install '.[test]' && python -m pytest")


@pytest.mark.parametrize("name", ["check", "test", "bench", "../.ci/run"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    path = ROOT / "scripts" / name
    assert path.stat().st_mode & 0o111
    parsed = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=10, check=False)
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.parametrize("script", ["scripts/config_reference.py", "scripts/metrics_reference.py"])
def test_tables_of_pages_are_those_of_the_code(script: str) -> None:
    reference = module(script)
    page = reference.PAGE.read_text(encoding="utf-8")
    assert page == reference.page_with_reference(page), f"the code has changed: run `python {script}`"


@pytest.mark.parametrize("name", ["digits", "emoji"])
def test_example_config_has_only_known_keys(name: str) -> None:
    """Bounds and types are checked when the config is loaded; this one also sees a key that has left the schema."""
    text = (ROOT / f"examples/{name}/{name}.yaml").read_text(encoding="utf-8")
    keys = {
        f"{section}.{key}"
        for section, value in yaml.safe_load(text).items()
        if isinstance(value, dict)
        for key in value
    }
    known = set(re.findall(r"^\| `([\w.]+)`", module("scripts/config_reference.py").reference(), re.MULTILINE))
    assert {key for key in keys if key not in known and not any(name.startswith(f"{key}.") for name in known)} == set()


@pytest.mark.parametrize("name", ["digits", "emoji"])
def test_example_model_folder_is_made_by_its_script(name: str, tmp_path: Path) -> None:
    made = module("examples/make_model.py")
    made.make_model(made.SIZES[name], tmp_path)
    committed = ROOT / f"examples/{name}/model"
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(made) == sorted(path.name for path in committed.iterdir())
    # config files name the library's version; what the version does not touch must be the same bytes
    for same in ("tokenizer.json", "chat_template.jinja"):
        assert made[same] == (committed / same).read_bytes(), same


def test_example_folders_hold_no_weights() -> None:
    assert [*ROOT.glob("examples/*/model/*.safetensors"), *ROOT.glob("examples/*/model/*.bin")] == []


def test_overview_has_a_line_for_every_part() -> None:
    overview = (ROOT / "docs/overview.md").read_text(encoding="utf-8")
    package = ROOT / "flowtrain"
    parts = [f"flowtrain/{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()]
    parts += [f"flowtrain/{path.name}" for path in package.glob("*.py") if path.name != "__init__.py"]
    assert len(parts) > 15
    assert [part for part in parts if f"`{part}`" not in overview] == []
