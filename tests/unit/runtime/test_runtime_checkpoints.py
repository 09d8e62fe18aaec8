import json
from pathlib import Path

import pytest

from flowtrain.errors import ConfigError, PlanError
from flowtrain.runtime.checkpoints import CheckpointWriter, newest_complete, read_state
from flowtrain.types import Phase, Role, Step

BOTH = frozenset({(Role.PRODUCER, 0), (Role.CONSUMER, 0), (Role.CONSUMER, 1)})


def step(index: int) -> Step:
    return Step(Phase.TRAIN, index, (), 0, 0, {"cursor": index * 10, "carried": [1, 2]})


def write(writer: CheckpointWriter, index: int) -> Path:
    folder = writer.begin(step(index), BOTH)
    for role, rank in BOTH:
        (folder / role).mkdir(exist_ok=True)
        (folder / role / "parameters.safetensors").write_bytes(b"x" * index)
        writer.saved(role, rank)
    writer.recorded(index, {"totals": {"steps": index}})
    [final] = writer.complete()
    return final


def test_checkpoint_is_complete_only_after_every_rank_and_its_record(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.begin(step(3), BOTH)
    writer.saved(Role.PRODUCER, 0)
    writer.saved(Role.CONSUMER, 1)
    writer.recorded(3, {})
    assert writer.complete() == []
    assert newest_complete(tmp_path).folder is None
    writer.saved(Role.CONSUMER, 0)
    assert [folder.name for folder in writer.complete()] == ["step-3"]
    assert not writer.pending


def test_state_goes_on_where_composition_stood(tmp_path: Path) -> None:
    folder = write(CheckpointWriter(tmp_path, keep=2), 4)
    assert read_state(folder) == {
        "step": 4,
        "composition": {"cursor": 40, "carried": [1, 2]},
        "epoch": 0,
        "totals": {"steps": 4},
    }


def test_keeps_the_newest_and_orders_them_by_number(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for index in (2, 9, 10):
        write(writer, index)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-9"]
    assert newest_complete(tmp_path).folder == tmp_path / "checkpoints" / "step-10"


@pytest.mark.parametrize("damage", ["no-mark", "short-file", "missing-file", "broken-mark", "file-elsewhere"])
def test_half_written_is_passed_over(tmp_path: Path, damage: str) -> None:
    writer = CheckpointWriter(tmp_path, keep=3)
    write(writer, 4)
    newest = write(writer, 8)
    match damage:
        case "no-mark":
            (newest / "complete.json").unlink()
        case "short-file":
            (newest / "producer" / "parameters.safetensors").write_bytes(b"x")
        case "missing-file":
            (newest / "consumer" / "parameters.safetensors").unlink()
        case "broken-mark":
            (newest / "complete.json").write_text("{")
        case "file-elsewhere":
            (tmp_path / "elsewhere").write_bytes(b"x")
            (newest / "complete.json").write_text(json.dumps({"step": 8, "files": {"../../elsewhere": 1}}))
    writer.begin(step(12), BOTH)
    found = newest_complete(tmp_path)
    assert found.folder == tmp_path / "checkpoints" / "step-4"
    assert [folder.name for folder in found.passed_over] == ["step-12.tmp", "step-8"]
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        read_state(newest)


@pytest.mark.parametrize("damage", [b"{" * 40, b"\xff" * 40])
def test_a_state_that_a_disk_has_damaged_is_told_as_such(tmp_path: Path, damage: bytes) -> None:
    folder = write(CheckpointWriter(tmp_path, keep=1), 4)
    content = (folder / "state.json").read_bytes()
    (folder / "state.json").write_bytes((damage + content)[: len(content)])
    with pytest.raises(ConfigError, match=r"step-4/state.json cannot be read .*another checkpoint"):
        read_state(folder)


def test_unwritable_folder_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(PlanError, match="cannot write checkpoint"):
        CheckpointWriter(tmp_path, keep=1).begin(step(1), BOTH)


def test_complete_mark_lists_every_file(tmp_path: Path) -> None:
    folder = write(CheckpointWriter(tmp_path, keep=1), 5)
    listed = json.loads((folder / "complete.json").read_text())["files"]
    assert listed.keys() == {"producer/parameters.safetensors", "consumer/parameters.safetensors", "state.json"}
