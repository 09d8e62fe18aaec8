"""Checkpoints: written aside, renamed when complete, chosen by completeness alone (no torch, no Ray).

    RUN_DIR/checkpoints/step-12.tmp/   producer/ consumer/  (by the stages)   state.json (by the controller)
                        │ complete.json written last, folder synced
                        ▼
    RUN_DIR/checkpoints/step-12/

Invariants: a folder named `step-N` with `complete.json` is whole; everything else is passed over; the newest `keep` are
kept and one is removed only after a newer one is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.errors import ConfigError, PlanError
from flowtrain.telemetry.files import sync, write_atomic
from flowtrain.types import Role, Step

COMPLETE = "complete.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)(\.tmp)?$")


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint and the folders passed over for it, newest first."""

    folder: Path | None
    passed_over: tuple[Path, ...]


def newest_complete(run_dir: Path) -> Found:
    """Look through RUN_DIR/checkpoints; half-written folders newer than the one chosen are listed (K07)."""
    numbered = []
    root = run_dir / "checkpoints"
    for folder in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            numbered.append((int(match[1]), match[2] is None, folder))
    passed_over: list[Path] = []
    for _, named, folder in sorted(numbered, reverse=True):
        if named and _is_whole(folder):
            return Found(folder, tuple(passed_over))
        passed_over.append(folder)
    return Found(None, tuple(passed_over))


def _is_whole(folder: Path) -> bool:
    """Every file that `complete.json` lists is there with the length it lists."""
    try:
        listed = json.loads((folder / COMPLETE).read_text())["files"]
        return all(_inside(name) and (folder / name).stat().st_size == size for name, size in listed.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _inside(name: str) -> bool:
    """Whether a relative path from a file stays within the file's folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def read_state(folder: Path) -> dict[str, Any]:
    """State of the controller at a checkpoint; `ConfigError` when it is not whole."""
    if not _is_whole(folder):
        raise ConfigError(
            f"{folder} is not a complete checkpoint ({COMPLETE} is missing or files differ): choose another"
        )
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / STATE} cannot be read ({error}): resume from another checkpoint") from error
    return dict(state)


@dataclass(slots=True)
class _Pending:
    """A checkpoint being written: the ranks still at it, and the state of the controller to add."""

    step: int
    folder: Path
    waiting: set[tuple[Role, int]]
    state: dict[str, Any]
    recorded: bool = False


class CheckpointWriter:
    """Begins checkpoints, hears of the stages' saves and of the step's record, and completes them in order."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.root = run_dir / "checkpoints"
        self.keep = keep
        self.newest: int | None = None
        self._pending: deque[_Pending] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def begin(self, step: Step, ranks: frozenset[tuple[Role, int]]) -> Path:
        """An empty folder for the stages to write to; what an earlier attempt left there is removed."""
        folder = self.root / f"step-{step.index}.tmp"
        with _disk(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        state = {"step": step.index, "epoch": step.epoch, "composition": dict(step.state)}
        self._pending.append(_Pending(step.index, folder, set(ranks), state))
        self.newest = step.index
        return folder

    def saved(self, role: Role, rank: int) -> None:
        """One rank has written its part of the oldest checkpoint that still waits for it."""
        next(pending for pending in self._pending if (role, rank) in pending.waiting).waiting.discard((role, rank))

    def recorded(self, step: int, extra: dict[str, Any]) -> None:
        """The record of `step` is written; `extra` is the controller's state right after it."""
        for pending in self._pending:
            if pending.step == step:
                pending.state.update(extra)
                pending.recorded = True

    def complete(self) -> list[Path]:
        """Finish those whose parts and record are there, oldest first; returns the finished folders."""
        done = []
        while self._pending and self._pending[0].recorded and not self._pending[0].waiting:
            pending = self._pending.popleft()
            done.append(self._complete(pending.folder, pending.state))
        return done

    def _complete(self, folder: Path, state: dict[str, Any]) -> Path:
        final = folder.with_suffix("")
        with _disk(folder):
            write_atomic(folder / STATE, json.dumps(state))
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
            write_atomic(folder / COMPLETE, json.dumps({"step": state["step"], "files": sizes}))
            shutil.rmtree(final, ignore_errors=True)
            folder.rename(final)
            sync(self.root)
        self._prune()
        return final

    def _prune(self) -> None:
        whole = []
        for folder in self.root.iterdir():
            match = _NAME.fullmatch(folder.name)
            if match and not match[2] and _is_whole(folder):
                whole.append((int(match[1]), folder))
        for _, folder in sorted(whole)[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Tells a full or read-only disk as what it is (K09)."""
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"cannot write checkpoint {folder}: {error.strerror}; free disk space or change run.dir"
        ) from error
