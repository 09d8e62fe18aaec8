"""What a run leaves of Ray's logs, and the room for them; no node is started."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ray.exceptions import AuthenticationError

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


@pytest.mark.parametrize(
    ("error", "answered", "token", "told"),
    [
        (AuthenticationError("no token"), True, None, "asks for a token and none was given: set RAY_AUTH_TOKEN"),
        (ConnectionError("no"), True, "abc", r"does not let this process in \(the token given is not the cluster's"),
        (ConnectionError("no"), True, None, r"does not let this process in \(it wants a token"),
        (ConnectionError("no"), False, "abc", r"cannot be joined; check that a Ray head listens there .*: no$"),
    ],
)
def test_a_head_that_answers_and_refuses_is_not_one_that_is_not_there(
    error: Exception,
    answered: bool,
    token: str | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if token is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    cluster = Cluster(ClusterConfig(address="head:6379"))
    cluster._answered = answered
    assert re.match(f"cluster.address: head:6379 .*{told}", cluster._refusal(error))


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
