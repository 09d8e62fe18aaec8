"""Producers on one node of a Ray cluster, consumers on the other: exact over each transport that reaches across, which
carries what tensor-parallel consumers read once for both.

Both nodes are on this machine, so shared memory would reach: the transport under test is forced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from file_site import Site
from integration_runs import EXAMPLES

from flowtrain.pool.transport.nixl_agent import why_missing

SECONDS = 240
OVERRIDES = (
    "train.step={samples: 6}",
    "train.epochs=null",
    "data.eval=null",
    "telemetry.progress=plain",
    "producers.threads=1",
    "consumers.threads=1",
)


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of two nodes with two cores each, which keep what they fetch apart from the driver."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        from ray.cluster_utils import Cluster

        store = {"num_cpus": 2, "object_store_memory": 96 * 2**20}
        cluster = Cluster(initialize_head=True, connect=False, head_node_args={**store, "include_dashboard": False})
        try:
            cluster.add_node(**store)
            yield cluster.address
        finally:
            cluster.shutdown()


def flowtrain(
    command: str, address: str, *arguments: str, overrides: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    given = [command, str(EXAMPLES / "emoji" / "emoji.yaml"), *arguments]
    for override in (*OVERRIDES, f"cluster.address={address}", *overrides):
        given += ["--set", override]
    return run_cli(*given)


def run_cli(*given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, "-m", "flowtrain.cli.main", *given],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
    )


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(EXAMPLES / "emoji") as site:
        yield site


@pytest.mark.parametrize("transport", ["nixl", "ray"])
def test_a_run_over_two_nodes_equals_plain(
    two_nodes: str, tmp_path: Path, transport: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder trains, so gradients go back too; two producers, so that a read meets two owners. Model and rows are
    at URLs, the pictures beside them: every node has copies of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if transport == "nixl" and (missing := why_missing()):
        pytest.skip(missing)
    sides = ("producers.num=2", "producers.node=1", "consumers.layout=t2", "consumers.node=0")
    sides += (f"pool.transport={transport}",)
    sides += ("telemetry.sinks=[ray]", f"model.path={site.url}/model", f"data.train={site.url}/data/train.jsonl")
    ended = flowtrain("verify", two_nodes, "--steps", "1", "--out", str(tmp_path / "run"), overrides=sides)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "verify passed: 1 steps" in ended.stdout
    assert "telemetry sink" not in ended.stderr
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert [rank["node"] for rank in plan["producers"]["ranks"]] == [1, 1]
    assert [rank["node"] for rank in plan["consumers"]["ranks"]] == [0, 0]
    assert [rank["segment_bytes"] > 0 for rank in plan["consumers"]["ranks"]] == [True, False]
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    read = {name: value for name, value in record.items() if name.startswith("pool/bytes_out/")}
    assert read == {f"pool/bytes_out/{way}": record["pool/bytes_out"] for way in (transport, "copies")}
    assert record["pool/bytes_out"] > 0
    assert record["grad_norm/encoder"] > 0
    assert f"train: {site.url}/data/train.jsonl" in (tmp_path / "run" / "config.yaml").read_text()
    rows = list(map(json.loads, (EXAMPLES / "emoji/data/train.jsonl").read_text().splitlines()))
    trained = [
        id for line in (tmp_path / "run/samples.jsonl").read_text().splitlines() for id in json.loads(line)["ids"]
    ]
    pictures = {f"/data/{name}" for row in rows if row["id"] in trained for name in row["images"]}
    assert pictures <= set(site.asked)
    assert 2 <= site.asked.count("/data/train.jsonl") <= 3, "once for the driver and once for each node"


def test_the_pool_is_measured_between_the_nodes(two_nodes: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ended = run_cli("pool", "bench", "--address", two_nodes, "--rounds", "1", "--json", str(file))
    assert ended.returncode == 0, ended.stderr[-2000:]
    speeds = {row["figure"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    places = ["16 MiB on one machine, shm", "16 MiB, node 0 to 1, ray"]
    places += [] if why_missing() else ["16 MiB, node 0 to 1, nixl"]
    assert all(speeds[f"put + get, {place}"] > 0 for place in places)


def test_the_doctor_measures_between_the_nodes(two_nodes: str, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    ended = run_cli("doctor", "--address", two_nodes, "--json", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    (pair,) = json.loads(file.read_text())["pairs"]
    assert (pair["refused"], pair["failed"]) == (None, {})
    assert pair["gigabytes_per_second"].keys() == {"ray", *([] if why_missing() else ["nixl"])}
    assert all(speed > 0 for speed in pair["gigabytes_per_second"].values())


HOLDING = """
import sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

class Held:
    def up(self): ...

ray.init(sys.argv[1], log_to_driver=False)
here = ray.get_runtime_context().get_node_id()
other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
place = NodeAffinitySchedulingStrategy(other, soft=False)
actor = ray.remote(num_cpus=2, scheduling_strategy=place)(Held).remote()
ray.get(actor.up.remote(), timeout=60)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_without_room_says_what_was_asked_and_what_is_free(two_nodes: str, tmp_path: Path) -> None:
    """Both cores of one node are taken, by an actor of another job."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDING, two_nodes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        sides = ("producers.node=1", "consumers.node=0", f"run.dir={tmp_path / 'run'}")
        ended = flowtrain("launch", two_nodes, overrides=(*sides, "cluster.start_timeout_seconds=2"))
        holder.kill()
    assert ended.returncode == 4, ended.stderr[-2000:]
    last = ended.stderr.splitlines()[-1]
    assert "had no room within 2 s: asked for 1 CPUs on node 0" in last
    assert "1 CPUs on node 1" in last
    assert " 0 of 2 CPUs" in last


def test_a_plan_that_fits_no_node_is_refused(two_nodes: str, tmp_path: Path) -> None:
    sides = ("consumers.num=3", "consumers.node=0", f"run.dir={tmp_path / 'run'}")
    ended = flowtrain("launch", two_nodes, overrides=sides)
    assert ended.returncode == 4
    last = ended.stderr.splitlines()[-1]
    assert "asked for 3 consumers with 1 CPUs each on node 0" in last
    assert "node 0" in last
    assert "2 CPUs, node 1" in last
