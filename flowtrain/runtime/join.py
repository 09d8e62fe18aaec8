"""Joins a process to the ranks of its side: rendezvous, and the process groups that its layout asks for."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.errors import PeerError
from flowtrain.parallel.groups import Groups, join_groups
from flowtrain.plan import Layout
from flowtrain.runtime.executor import StageSpec
from flowtrain.runtime.nodes import LOOPBACK, interface_of


def join_side(spec: StageSpec, timeout_seconds: float, store: Any, address: str) -> Groups:
    """The groups of the side; alone where it needs no collective.

    Args:
        timeout_seconds: longest wait for the others, and of each collective.
        store: the rendezvous, where this process has opened it.
        address: of this process's node.

    Raises:
        PeerError: they did not come together.
    """
    if spec.store is None:
        return Groups(Layout(), 0)
    rank, layout, (host, port) = spec.rank_plan.rank, spec.layout, spec.store
    timeout = timedelta(seconds=timeout_seconds)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(LOOPBACK if host == LOOPBACK else address)
    try:
        if not dist.is_initialized():  # by the other side of a colocated rank, whose ranks are the same processes
            if store is None:
                store = dist.TCPStore(host, port, layout.world_size, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
        return join_groups(layout, rank, torch.device(spec.rank_plan.device), timeout_seconds)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise PeerError(
            f"{spec.rank_plan.role} {rank} could not join the {layout.world_size} ranks of its side at {host}:{port}: "
            f"{error}"
        ) from error
