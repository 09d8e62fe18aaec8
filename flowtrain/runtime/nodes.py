"""The nodes of the cluster as a run numbers them, and what must be the same on all of them.

Node 0 is the driver's; the others follow in the order of their addresses. A process learns at its start whether it is
alone on one node or meets others: its side's rendezvous listens on loopback, or on its node's address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain import mirror
from flowtrain.allocator import NodeRoom
from flowtrain.config.schema import Config
from flowtrain.errors import PlanError
from flowtrain.plan import RankPlan
from flowtrain.telemetry.tables import PlaceRow

LOOPBACK = "127.0.0.1"
"""Where the ranks of a side on one node meet: nothing listens to others."""

_KIND = "accelerator_type:"
"""What the resource of a node begins with by which Ray names its GPUs."""

_SIOCGIFADDR = 0x8915


def listen_on_loopback() -> None:
    """Called before Ray is imported, a local node listens on loopback; else on every interface, for others to join."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: Ray's id of it, its address, and its cores, GPUs and memory, free or not; `gpu`: what
    the GPUs are, in Ray's words, such as `H100`."""

    number: int
    id: str
    address: str
    cpus: float
    gpus: float
    memory_bytes: float = 0.0
    gpu: str | None = None

    @property
    def room(self) -> NodeRoom:
        return NodeRoom(self.address, self.cpus, self.gpus, self.memory_bytes, self.gpu)


def number_nodes(found: Iterable[Mapping[str, Any]], driver_id: str) -> tuple[Node, ...]:
    """Nodes alive, from what `ray.nodes()` returns."""
    alive = [node for node in found if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != driver_id, _numeric(node["NodeManagerAddress"]), node["NodeID"]))
    return tuple(
        Node(
            number,
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
            node["Resources"].get("memory", 0.0),
            next((name.removeprefix(_KIND) for name in sorted(node["Resources"]) if name.startswith(_KIND)), None),
        )
        for number, node in enumerate(alive)
    )


def who_runs_where(ranks: Iterable[RankPlan], nodes: Sequence[Node]) -> list[PlaceRow]:
    """Processes by node, role and device, in that order."""
    groups: dict[tuple[int, str, str, int], list[int]] = {}
    for plan in ranks:
        groups.setdefault((plan.node, plan.role.value, plan.device, plan.threads), []).append(plan.rank)
    return [
        PlaceRow(node, nodes[node].address, role, _spans(numbers), device, threads)
        for (node, role, device, threads), numbers in sorted(groups.items())
    ]


def _spans(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _numeric(address: str) -> tuple[int, ...]:
    """10.0.0.9 comes before 10.0.0.10; other forms keep the order of their letters."""
    try:
        return tuple(socket.inet_aton(address))
    except OSError:
        return tuple(address.encode())


def interface_of(address: str) -> str:
    """The network interface of this machine that has the address.

    Raises:
        PlanError: none has it.
    """
    if address.startswith("127."):
        return "lo"
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise PlanError(
        f"Ray knows this node ({socket.gethostname()}) as {address} and none of its interfaces ({', '.join(names)}) "
        f"has that address: start Ray on the node with --node-ip-address set to one of its own"
    )


@dataclass(frozen=True, slots=True)
class Sight:
    """What one path looks like from a process: bytes of a file, -1 for a folder, None where there is nothing; and why a
    URL cannot be read there."""

    path: str
    bytes: int | None
    refused: str | None = None


def read_paths(config: Config) -> list[Path]:
    """What every node of a run reads."""
    paths = [config.model.path, config.model.path / "config.json", config.data.train, config.data.eval]
    return [path for path in paths if path is not None]


def look(paths: Sequence[str]) -> tuple[Sight, ...]:
    """What is at these paths, seen from here; what is at a URL is fetched for this node."""
    seen = []
    for path in paths:
        try:
            place = mirror.local_path(path) if mirror.is_url(path) else Path(path)
            mirror.fetch(place)
            seen.append(Sight(path, -1 if place.is_dir() else place.stat().st_size))
        except mirror.FetchError as error:
            seen.append(Sight(path, None, str(error)))
        except OSError:
            seen.append(Sight(path, None))
    return tuple(seen)


def check_seen(number: int, address: str, seen: Iterable[Sight], here: Iterable[Sight]) -> None:
    """Refuse a node that does not have what the driver has (exit 4)."""
    where = f"node {number} ({address})"
    for there, mine in zip(seen, here, strict=True):
        if there.refused:
            raise PlanError(f"{where}: {there.refused}")
        if there.bytes is None and mine.bytes is not None:
            raise PlanError(
                f"{where} does not have {there.path}, which the run needs there: put model, data and run.dir on "
                f"storage that all nodes share, under the same path"
            )
        if there.bytes != mine.bytes:
            raise PlanError(
                f"{where} has another {there.path} ({_size(there)}) than the driver's node ({_size(mine)}): put it on "
                f"storage that all nodes share, or copy it again"
            )


def _size(sight: Sight) -> str:
    return "a folder" if sight.bytes == -1 else f"{sight.bytes} bytes"
