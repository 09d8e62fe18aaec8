"""What a run leaves of Ray's logs, and the room for them; no node is started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowtrain.config.schema import ClusterConfig
from flowtrain.errors import Interrupted, LostProcessError, PlanError, Terminated
from flowtrain.runtime.cluster import TEMP_BYTES, Cluster, check_temp_space, temp_folder


def after(error: BaseException | None, folder: Path) -> bool:
    """Whether the logs of a run that `error` ended are there afterwards."""
    (folder / "logs").mkdir(parents=True)
    cluster = Cluster(ClusterConfig())
    cluster.connected, cluster._session = True, folder
    cluster.__exit__(None if error is None else type(error), error, None)
    assert not cluster.connected
    return (folder / "logs").is_dir()


@pytest.mark.parametrize("error", [PlanError("late: see the logs"), LostProcessError("lost"), AssertionError("bug")])
def test_a_failed_run_keeps_the_logs_that_its_message_may_name(error: BaseException, tmp_path: Path) -> None:
    assert after(error, tmp_path / "session")


@pytest.mark.parametrize("error", [None, Interrupted("SIGINT"), Terminated("SIGTERM")])
def test_a_run_that_ended_as_wanted_leaves_none(error: BaseException | None, tmp_path: Path) -> None:
    assert not after(error, tmp_path / "session")


def test_a_temporary_folder_without_room_is_told_with_both_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    for folder in (tmp_path, tmp_path / "not" / "there" / "yet"):
        check_temp_space(folder, 0)
        with pytest.raises(PlanError, match=rf"may take {free * 2} bytes and its disk has \d+ free.*cluster\.temp_dir"):
            check_temp_space(folder, free * 2)


def test_a_local_node_looks_at_the_folder_that_ray_will_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert temp_folder(ClusterConfig()) == tmp_path / "ray"
    assert temp_folder(ClusterConfig(temp_dir=tmp_path / "mine")) == tmp_path / "mine"
    full = Path("/proc")  # a file system without room
    assert shutil.disk_usage(full).free < TEMP_BYTES
    with pytest.raises(PlanError, match=r"Ray's temporary folder /proc/ray"):
        Cluster(ClusterConfig(temp_dir=full / "ray")).start([])
