"""Ray nodes on this machine, in a process of their own: `python ray_nodes.py NUM_NODES CPUS [FOLDER]`.

Tells addresses as one line of JSON. With FOLDER every node has a network namespace, and with it an address, of its own;
their links meet in a bridge, and FOLDER has other contents on each.

| line on stdin | does |
|---|---|
| `kill N` | SIGKILL to all processes of node N (0: the head); answers `done` |
| end of file | ends the cluster |
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NEW_NETWORK, NEW_MOUNTS, SLAVE, DETACH = 0x40000000, 0x20000, 0x84000, 2
DEVICE = "ft-node"
"""The link of each node, under one name, so that one UCX_NET_DEVICES does for all."""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], capture_output=True, timeout=20, check=check)


@contextmanager
def namespaces(num: int) -> Iterator[list[str]]:
    names = [f"ft-ray{os.getpid()}-{number}" for number in range(num)]
    hub = f"ft-ray{os.getpid()}-hub"  # a bridge of its own: UCX leaves out a device that is one
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            ip("-n", name, "link", "add", DEVICE, "type", "veth", "peer", f"port{number}", "netns", hub)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        yield names
    finally:
        for name in (hub, *names):
            ip("netns", "del", name, check=False)


def enter(name: str, folder: str) -> None:
    """This thread, and processes that it starts, are in the namespace from now on, see its devices in /sys and a disk
    of its own at `folder`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments):
            raise OSError(ctypes.get_errno(), f"{function.__name__} for {name}")

    with open(f"/var/run/netns/{name}") as file:
        call(libc.setns, file.fileno(), NEW_NETWORK)
    call(libc.unshare, NEW_MOUNTS)
    call(libc.mount, b"none", b"/", None, SLAVE, None)
    call(libc.umount2, b"/sys", DETACH)
    call(libc.mount, name.encode(), b"/sys", b"sysfs", 0, None)
    call(libc.mount, name.encode(), folder.encode(), b"tmpfs", 0, b"size=16m")


def main(num_nodes: int, cpus: int, names: list[str], folder: str = "") -> None:
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    def size(number: int) -> dict[str, Any]:
        own = {"num_cpus": cpus, "object_store_memory": 96 * 2**20}
        if names:
            enter(names[number], folder)
            own["node_ip_address"] = f"10.78.0.{number + 1}"
        return own

    host = "10.78.0.1" if names else "127.0.0.1"
    dashboard = {"include_dashboard": True, "dashboard_host": host, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={**size(0), **dashboard})
    nodes = [cluster.head_node, *(cluster.add_node(**size(number)) for number in range(1, num_nodes))]
    told = {
        "address": cluster.address,
        "dashboard": f"http://{cluster.webui_url}",
        "session": nodes[0].get_session_dir_path(),
        "namespaces": names,
    }
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        node = nodes[int(line.split()[1])]
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    number, cores = int(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3:]:
        os.environ["UCX_NET_DEVICES"] = DEVICE
        with namespaces(number) as made:
            main(number, cores, made, sys.argv[3])
    else:
        main(number, cores, [])
