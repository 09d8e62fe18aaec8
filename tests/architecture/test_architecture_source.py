"""Rules of the source that no linter knows: file length, words in names, paths of one machine.

`batch` and `worker` mean three things each in this field; the glossary has a word for every one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_LINES = 400
BANNED_WORDS = frozenset({"batch", "batches", "worker", "workers", "manager", "helper", "handler", "util", "utils"})
SOURCE_FOLDERS = ("flowtrain", "tests", "benchmarks", "examples", "scripts")
TEXT_SUFFIXES = frozenset({".py", ".md", ".yaml", ".cfg", ".toml"})
PATH_OF_ONE_MACHINE = re.compile(r"(?<![\w./}])/(?:home|root|Users|mnt|scratch|workspace|work)/\w")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def python_files(repository: Path) -> list[Path]:
    return sorted(path for folder in SOURCE_FOLDERS for path in (repository / folder).rglob("*.py"))


def text_files(repository: Path) -> list[Path]:
    folders = (*SOURCE_FOLDERS, "docs", "deploy")
    nested = (path for folder in folders for path in (repository / folder).rglob("*"))
    top = (path for path in repository.iterdir() if path.is_file())
    return sorted(path for path in (*nested, *top) if path.suffix in TEXT_SUFFIXES)


def names_defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that the code itself chooses: not those it imports, calls or passes to others as keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def banned_names(source: str) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in names_defined(ast.parse(source))
        if BANNED_WORDS & {word.lower() for word in WORD.findall(name)}
    ]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def make_batch(rows): ...", ["make_batch"]),
        ("class PackHandler: ...", ["PackHandler"]),
        ("num_workers = 1\nself.batch_size: int = 2", ["num_workers", "batch_size"]),
        ("def pack(worker): ...", ["worker"]),
        ("loader = DataLoader(rows, batch_size=1)\nfrom x import BatchFeature", []),
        ("coworker_like = 1", []),
    ],
)
def test_banned_names_are_seen(source: str, names: list[str]) -> None:
    assert [name for _, name in banned_names(source)] == names


def test_no_banned_word_in_a_name(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {name}"
        for path in python_files(repository)
        for line, name in banned_names(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_banned_word_in_a_file_name(repository: Path) -> None:
    found = [path.name for path in python_files(repository) if BANNED_WORDS & set(WORD.findall(path.stem))]
    assert found == []


def test_no_file_is_too_long(repository: Path) -> None:
    lengths = {
        str(path.relative_to(repository)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(repository)
    }
    assert len(lengths) > 50
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_its_idea(repository: Path) -> None:
    silent = [
        str(path.relative_to(repository))
        for path in python_files(repository)
        if "tests" not in path.relative_to(repository).parts
        and path.read_text(encoding="utf-8").strip()
        and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []


def test_no_path_of_one_machine(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{number}"
        for path in text_files(repository)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PATH_OF_ONE_MACHINE.search(line)
    ]
    assert found == []


def test_test_files_have_unique_names(repository: Path) -> None:
    names = [path.name for path in (repository / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
