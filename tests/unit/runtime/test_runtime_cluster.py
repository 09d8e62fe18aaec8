"""What a run leaves of Ray's logs; no node is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.schema import ClusterConfig
from flowtrain.errors import Interrupted, LostProcessError, PlanError, Terminated
from flowtrain.runtime.cluster import Cluster


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
