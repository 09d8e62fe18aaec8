"""Collects what `flowtrain doctor` judges: facts of every node, by an actor on each, and what goes between two of them.

Every two nodes of a small cluster are a pair; of a larger one each node and the next, so that every node is tried both
ways. All that is started has no cores of its own: it runs beside whatever uses the cluster.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.config.schema import ClusterConfig, Config
from flowtrain.errors import PlanError
from flowtrain.mirror import shown
from flowtrain.runtime.checkup import NodeFacts, PairFacts, facts_here, refusal
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.nodes import LOOPBACK, Node, look, read_paths

ANSWER_SECONDS = 60.0
CONNECT_SECONDS = 5.0
ALL_PAIRS_UP_TO = 6
PAYLOAD_BYTES = 16 * 2**20
ROUNDS = 3


def examine_here(config: Config | None) -> list[NodeFacts]:
    """Of this machine alone, without Ray."""
    wanted = _inputs(config)
    return [replace(facts_here(0, LOOPBACK), seen=look(wanted), refused_ports=_refused_ports(config))]


def examine(address: str, config: Config | None, bench: bool) -> tuple[list[NodeFacts], list[PairFacts]]:
    """Of all nodes of a running cluster and the pairs among them; `bench`: bytes are sent between these.

    Raises:
        PlanError: the cluster cannot be joined, or a node does not answer.
    """
    probe = _Probe(config)
    with Cluster(ClusterConfig(address=address)) as cluster, probe:
        nodes = cluster.join()
        actor = ray.remote(num_cpus=0)(Examiner)
        examiners = [actor.options(scheduling_strategy=_at(node)).remote(node.number, node.address) for node in nodes]
        facts = _facts(nodes, examiners, [*_inputs(config), *probe.paths])
        facts[0] = replace(facts[0], refused_ports=_refused_ports(config))  # the driver's node, where this runs
        pairs = _connect(nodes, examiners, _pairs(len(nodes)))
        return facts, _bench(nodes, pairs) if bench else pairs


def _inputs(config: Config | None) -> list[str]:
    return [] if config is None else [shown(path) for path in read_paths(config)]


def _refused_ports(config: Config | None) -> tuple[tuple[str, str], ...]:
    """Of those that the config names."""
    if config is None or "prometheus" not in config.telemetry.sinks:
        return ()
    host, port = config.telemetry.prometheus_host, config.telemetry.prometheus_port
    why = refusal(host, port)
    return () if why is None else ((f"{host}:{port}", why),)


class _Probe:
    """A file in the folder that holds `run.dir`, there while this is open: a node that shares it sees it."""

    def __init__(self, config: Config | None) -> None:
        self.paths: list[str] = []
        if config is not None:
            run_dir = config.run.dir
            folder = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
            self.paths = [str(folder / f".flowtrain-doctor-{secrets.token_hex(6)}")]

    def __enter__(self) -> None:
        for path in self.paths:
            try:
                Path(path).write_text("made by flowtrain doctor, gone when it ends\n")
            except OSError as error:
                raise PlanError(f"run.dir: {Path(path).parent} cannot be written: {error.strerror}") from error

    def __exit__(self, *raised: object) -> None:
        for path in self.paths:
            Path(path).unlink(missing_ok=True)


class Examiner:
    """What looks around on a node, and listens on a port of its address for the others to try."""

    def __init__(self, number: int, address: str) -> None:
        self._number, self._address = number, address
        self._socket = socket.create_server((address, 0))
        threading.Thread(target=self._take, daemon=True).start()

    def facts(self, paths: Sequence[str]) -> NodeFacts:
        return replace(facts_here(self._number, self._address), seen=look(paths))

    def clock(self) -> float:
        return time.time()

    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def connect(self, address: str, port: int) -> str | None:
        """Why a connection cannot be opened; None when it can."""
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            return str(error)
        return None

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()


def _facts(nodes: Sequence[Node], examiners: Sequence[Any], wanted: Sequence[str]) -> list[NodeFacts]:
    """Of each node; its clock is read three times, and the shortest way counts."""
    asked = [examiner.facts.remote(list(wanted)) for examiner in examiners]
    found = []
    for node, examiner, ref in zip(nodes, examiners, asked, strict=True):
        facts: NodeFacts = _answer(ref, node)
        offsets = []
        for _ in range(3):
            before = time.time()
            there = _answer(examiner.clock.remote(), node)
            after = time.time()
            offsets.append(((after - before) / 2, there - (before + after) / 2))
        error, ahead = min(offsets)
        found.append(replace(facts, told_gpus=node.gpus, clock_seconds=ahead, clock_error_seconds=error))
    return found


def _answer(ref: Any, node: Node) -> Any:
    try:
        return ray.get(ref, timeout=ANSWER_SECONDS)
    except Exception as error:  # Ray has many kinds of it, and all say that the node cannot be used
        text = " ".join(str(error).split())[-300:]
        raise PlanError(
            f"node {node.number} ({node.address}) cannot run FlowTrain's own code within {ANSWER_SECONDS:g} s: install "
            f"flowtrain there, the same version as here, and start its Ray anew ({text})"
        ) from error


def _pairs(num: int) -> list[tuple[int, int]]:
    """Owner and reader of each pair."""
    if num <= ALL_PAIRS_UP_TO:
        return list(itertools.combinations(range(num), 2))
    return [(number, (number + 1) % num) for number in range(num)]


def _connect(nodes: Sequence[Node], examiners: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[PairFacts]:
    """Whether the reader of each pair can open a connection to a port that the owner has chosen."""
    ports = [_answer(examiner.port.remote(), node) for node, examiner in zip(nodes, examiners, strict=True)]
    asked = [examiners[reader].connect.remote(nodes[owner].address, ports[owner]) for owner, reader in pairs]
    return [
        PairFacts(reader, owner, _answer(ref, nodes[reader])) for (owner, reader), ref in zip(pairs, asked, strict=True)
    ]


def _at(node: Node) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def _bench(nodes: Sequence[Node], pairs: Sequence[PairFacts]) -> list[PairFacts]:
    """Put and get of a block through the pool, over each transport that reaches across."""
    from flowtrain.pool.transport.nixl_agent import why_missing
    from flowtrain.runtime.pool_bench import PoolSide, timed

    transports = ["ray"] if why_missing() else ["nixl", "ray"]
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(PoolSide)

    def side(node: int, owner: int) -> Any:
        return actor.options(scheduling_strategy=_at(nodes[node])).remote(owner, PAYLOAD_BYTES, transports)

    owners = {number: side(number, 2 * number) for number in sorted({pair.owner for pair in pairs})}
    readers = {number: side(number, 2 * number + 1) for number in sorted({pair.reader for pair in pairs})}
    try:
        found = []
        for pair in pairs:
            speeds: dict[str, float] = {}
            failed: dict[str, str] = {}
            for name in transports:
                try:
                    seconds = timed(owners[pair.owner], readers[pair.reader], name, ROUNDS)
                    speeds[name] = PAYLOAD_BYTES / seconds / 1e9
                except Exception as error:  # whatever a transport or Ray says: it does not work here
                    failed[name] = " ".join(str(error).split())[-200:]
            found.append(replace(pair, gigabytes_per_second=speeds, failed=failed))
        return found
    finally:
        for one in (*owners.values(), *readers.values()):
            ray.kill(one)
