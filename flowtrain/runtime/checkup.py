"""What one machine is like for a run, and what is wrong with several of them (the rules are pure, contract C10).

    facts of each node ─┐
    paths seen there    ├─▶ findings ─▶ one line each: where, what, what to change
    pairs of nodes     ─┘

| finding | is | exit code of `flowtrain doctor` |
|---|---|---|
| wrong | a run would fail, or its processes would not agree | 4 |
| slow | it works, and not as well as it could | 0 |
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import flowtrain
from flowtrain.allocator import local_inventory
from flowtrain.allocator.gpus import HIDDEN
from flowtrain.pool import numa
from flowtrain.runtime.nodes import Sight
from flowtrain.telemetry.nvml import NO_DEVICE, REASONS

PACKAGES = ("torch", "ray", "transformers", "nixl-cu13", "nixl-cu12")
NODE_FILES = 1024
"""Open files that a process of a run of some hundred processes may need."""

STORE_BYTES = 96 * 2**20
"""Of /dev/shm, which Ray's object store takes for token ids at least."""

CLOCK_SECONDS = 0.5
NO_GPU = (REASONS["NVML_ERROR_LIBRARY_NOT_FOUND"], NO_DEVICE, HIDDEN)
"""Why a machine may have none with nothing to mend."""

UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as a process on it sees it. Bytes, or -1 where there is no limit; `code`: of FlowTrain's own files.

    `gpus`: name, memory bytes and NVLinks of each; `gpu_numa`: NUMA nodes that these lie on; `core_numa`: those whose
    cores may be used; `fixed_pages`: why pages may not be put on a NUMA node (never of a machine of one).
    `told_gpus`: how many its Ray was started with, None without Ray; `clock_seconds`: ahead of the first node, known to
    `clock_error_seconds`; `refused_ports`: where the run cannot listen as it is to, and why.
    """

    number: int
    name: str
    address: str
    python: str
    code: str
    packages: dict[str, str]
    cpus: int
    memory_bytes: int
    shm_bytes: int
    locked_bytes: int
    open_files: int
    gpus: tuple[tuple[str, int, int], ...] = ()
    gpu_reason: str | None = None
    gpu_numa: tuple[int, ...] = ()
    core_numa: tuple[int, ...] = (0,)
    fixed_pages: str | None = None
    rdma: bool = False
    told_gpus: float | None = None
    clock_seconds: float = 0.0
    clock_error_seconds: float = 0.0
    seen: tuple[Sight, ...] = ()
    refused_ports: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        return f"node {self.number} ({self.address})"


@dataclass(frozen=True, slots=True)
class PairFacts:
    """From one node to another: `refused`: why a connection to a free port cannot be opened; GB/s of each transport;
    `failed`: transport ▶ why it brought nothing."""

    reader: int
    owner: int
    refused: str | None = None
    gigabytes_per_second: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["wrong", "slow"]
    check: str
    where: str
    what: str
    change: str

    def __str__(self) -> str:
        return f"{self.level}: {self.check}, {self.where}: {self.what}; {self.change}"


def facts_here(number: int, address: str) -> NodeFacts:
    """Of this machine, as this process may use it."""
    inventory, numa_nodes = local_inventory(), numa.nodes()
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return NodeFacts(
        number,
        socket.gethostname(),
        address,
        platform.python_version(),
        code_digest(),
        packages,
        inventory.cpus,
        inventory.memory_bytes,
        inventory.shm_bytes,
        _unlimited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        _unlimited(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        tuple((gpu.name, gpu.memory_bytes, gpu.links) for gpu in inventory.devices),
        inventory.gpu_reason,
        tuple(sorted({gpu.numa_node for gpu in inventory.devices if gpu.numa_node is not None})),
        numa.nodes_of_cores(os.sched_getaffinity(0)),
        numa.refusal(numa_nodes[0]) if len(numa_nodes) > 1 else None,
        Path("/sys/class/infiniband").is_dir() and any(os.scandir("/sys/class/infiniband")),
    )


def refusal(host: str, port: int) -> str | None:
    """Why nothing can listen there on this machine; None when it can."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unlimited(limit: int) -> int:
    return -1 if limit == UNLIMITED else limit


def code_digest() -> str:
    """Twelve digits that are the same wherever FlowTrain's own files are."""
    folder = Path(flowtrain.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def findings(nodes: Sequence[NodeFacts], pairs: Sequence[PairFacts] = (), pool_bytes: int = 0) -> list[Finding]:
    """What is wrong first. `pool_bytes`: of a node, as the config says; 0 where there is none."""
    found = [*_versions(nodes), *_paths(nodes), *_clocks(nodes), *_pairs(pairs, nodes), *_gpus(nodes)]
    for node in nodes:
        found += _limits(node, pool_bytes)
    return sorted(found, key=lambda finding: finding.level != "wrong")


def _versions(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    names = sorted({name for node in nodes for name in node.packages})
    told: dict[str, list[str]] = {"Python": [node.python for node in nodes], "FlowTrain": [node.code for node in nodes]}
    told |= {name: [node.packages.get(name, "not installed") for node in nodes] for name in names}
    for name, versions in told.items():
        if len(set(versions)) > 1:
            groups = {one: [n.number for n, its in zip(nodes, versions, strict=True) if its == one] for one in versions}
            what = "; ".join(f"{one} on node {', '.join(map(str, numbers))}" for one, numbers in groups.items())
            level: Literal["wrong", "slow"] = "slow" if name.startswith("nixl") else "wrong"
            yield Finding(level, "versions", name, what, "install the same on all nodes")


def _paths(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for node in nodes[1:]:
        for mine, there in zip(nodes[0].seen, node.seen, strict=True):
            if there.bytes != mine.bytes:
                what = f"{there.path} is not there" if there.bytes is None else f"{there.path} is another one"
                what = there.refused or f"{what} (as {nodes[0].where} has it)"
                yield Finding("wrong", "paths", node.where, what, "put it on storage that all nodes share, same path")
    for sight in nodes[0].seen:
        if sight.bytes is None:
            what = sight.refused or f"{sight.path} is not there"
            yield Finding("wrong", "paths", nodes[0].where, what, "check the config")


def _clocks(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for node in nodes:
        if abs(node.clock_seconds) - node.clock_error_seconds > CLOCK_SECONDS:
            what = f"its clock differs by {node.clock_seconds:+.2f} s from that of {nodes[0].where}"
            yield Finding(
                "slow",
                "clocks",
                node.where,
                what,
                "let chrony or ntpd set it: traces and logs do not line up",
            )


def _gpus(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    kinds = {gpu[0] for node in nodes for gpu in node.gpus}
    if len(kinds) > 1:
        what = f"different devices: {', '.join(sorted(kinds))}"
        yield Finding("slow", "GPUs", "all nodes", what, "place the two sides by kind (producers.node)")
    for node in nodes:
        if node.told_gpus is not None and node.told_gpus != len(node.gpus):
            what = f"Ray was started with {node.told_gpus:g} GPUs and NVML lists {len(node.gpus)}"
            what += f" ({node.gpu_reason})" if node.gpu_reason and not node.gpus else ""
            yield Finding("wrong", "GPUs", node.where, what, "start its Ray anew without --num-gpus")
        elif node.gpu_reason not in (None, *NO_GPU):
            yield Finding("slow", "GPUs", node.where, f"none can be used: {node.gpu_reason}", "mend its driver")
        if len(node.gpus) > 1 and not any(links for _, _, links in node.gpus):
            what = f"its {len(node.gpus)} GPUs have no NVLink to each other"
            yield Finding("slow", "NVLink", node.where, what, "prefer copies and FSDP to tensor parallel on it")
        if node.gpus and node.fixed_pages:
            what = f"pages cannot be put beside their GPU ({node.fixed_pages})"
            yield Finding("slow", "NUMA", node.where, what, "let the container use mbind (docker --cap-add SYS_NICE)")
        if far := set(node.gpu_numa) - set(node.core_numa):
            what = f"GPUs lie on NUMA node {_list(far)} and only cores of {_list(node.core_numa)} may be used"
            yield Finding(
                "slow", "NUMA", node.where, what, "start its Ray on all cores (taskset, cpuset of the container)"
            )


def _list(some: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(some)))


def _limits(node: NodeFacts, pool_bytes: int) -> Iterable[Finding]:
    if node.shm_bytes < STORE_BYTES:
        what = f"/dev/shm has {node.shm_bytes} bytes free and token ids take {STORE_BYTES}"
        yield Finding(
            "slow",
            "/dev/shm",
            node.where,
            what,
            "enlarge it (docker --shm-size, a Memory volume)",
        )
    if pool_bytes > node.memory_bytes:
        what = f"pool.bytes is {pool_bytes} and {node.memory_bytes} bytes of memory are free"
        yield Finding("wrong", "memory", node.where, what, "lower pool.bytes, or free memory")
    for address, why in node.refused_ports:
        what = f"the prometheus sink cannot listen on {address}: {why}"
        change = "end what listens there, or set telemetry.prometheus_port (0: a free one) or prometheus_host"
        yield Finding("wrong", "ports", node.where, what, change)
    if 0 <= node.open_files < NODE_FILES:
        what = f"a process may have {node.open_files} files open and {NODE_FILES} may be needed"
        yield Finding("wrong", "open files", node.where, what, "raise it before Ray starts (ulimit -Hn, LimitNOFILE)")
    if (node.gpus or node.rdma) and 0 <= node.locked_bytes < max(pool_bytes, 2**30):
        what = f"{node.locked_bytes} bytes may be locked, less than the pool"
        yield Finding(
            "slow",
            "locked memory",
            node.where,
            what,
            "ulimit -l unlimited before Ray starts",
        )


def _pairs(pairs: Sequence[PairFacts], nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for pair in pairs:
        way = f"node {pair.owner} to {pair.reader}"
        if pair.refused is not None:
            what = f"no connection to {nodes[pair.owner].address}: {pair.refused}"
            yield Finding(
                "wrong",
                "ports",
                way,
                what,
                "open all ports between the nodes",
            )
        for name, why in pair.failed.items():
            change = "set pool.transport: ray, or UCX_NET_DEVICES" if name == "nixl" else "see the node's Ray logs"
            yield Finding("wrong", "transport", way, f"{name} brought nothing: {why}", change)
        if pair.gigabytes_per_second and "nixl" not in {*pair.gigabytes_per_second, *pair.failed}:
            yield Finding(
                "slow",
                "transport",
                way,
                "features go through Ray's object store",
                "pip install 'flowtrain[nixl]' on every node",
            )
