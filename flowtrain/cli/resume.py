"""Which checkpoint a run goes on from (contract C11, K07).

| `--resume` | goes on from |
|---|---|
| `latest` | the last complete checkpoint in the config's `run.dir` |
| RUN_DIR | the last complete checkpoint there |
| RUN_DIR/checkpoints/step-N | that one, which must be complete |

Later checkpoints are set aside: the run will write its own, and the next `--resume` must not mix the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowtrain.errors import ConfigError
from flowtrain.runtime.checkpoints import newest_complete, read_state

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint and the run that it belongs to; `notes`: lines for the user."""

    run_dir: Path
    checkpoint: Path
    notes: tuple[str, ...]


def find_checkpoint(run_dir: Path, resume: str) -> FoundCheckpoint:
    """Choose by the table above; `run_dir` is the config's. Raises `ConfigError` when there is none."""
    given = run_dir if resume == "latest" else Path(resume).expanduser().absolute()
    if not given.is_dir():
        hint = "there is no run to go on with" if resume == "latest" else "give a run's folder, or `latest`"
        raise ConfigError(f"--resume {resume}: {given} does not exist; {hint}")
    if given.parent.name == "checkpoints" and given.name.startswith("step-"):
        if not _STEP.fullmatch(given.name):
            raise ConfigError(f"--resume {resume}: {given.name} is half written; choose another checkpoint")
        step = read_state(given)["step"]
        return FoundCheckpoint(given.parent.parent, given, (f"resuming from {given} (step {step})",))
    found = newest_complete(given)
    passed = [f"passed over {folder}: half written" for folder in found.passed_over]
    if found.folder is None:
        earlier = [old for old in _earlier_runs(given) if newest_complete(old).folder is not None]
        hint = f"; an earlier run has one: --resume {earlier[0]}" if earlier else "; start without --resume"
        what = f" ({len(passed)} half written)" if passed else ""
        raise ConfigError(f"--resume {resume}: {given / 'checkpoints'} has no complete checkpoint{what}{hint}")
    return FoundCheckpoint(given, found.folder, (*passed, f"resuming from {found.folder}"))


def _earlier_runs(run_dir: Path) -> list[Path]:
    """Runs moved aside from this folder, newest first."""
    pattern = re.compile(rf"{re.escape(run_dir.name)}\.old-(\d+)")
    found = [(int(match[1]), path) for path in run_dir.parent.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def set_newer_aside(found: FoundCheckpoint) -> Iterator[str]:
    """Rename checkpoints later than the chosen one, so that none is taken for the new run's; yields a line for each."""
    chosen = _number(found.checkpoint)
    assert chosen is not None
    for folder in sorted(found.checkpoint.parent.iterdir()):
        number = _number(folder)
        if number is not None and number > chosen:
            aside = _free_name(folder)
            folder.rename(aside)
            yield f"set {folder.name} aside as {aside.name}: the run goes on from {found.checkpoint.name}"


def _number(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def _free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return aside
