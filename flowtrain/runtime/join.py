"""Joins a process to the ranks of its side: its device, rendezvous, the process groups that its layout asks for."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.errors import PeerError, PlanError
from flowtrain.parallel.groups import Groups, join_groups
from flowtrain.plan import Layout, RankPlan
from flowtrain.runtime.executor import StageSpec
from flowtrain.runtime.nodes import LOOPBACK, interface_of


def check_device(plan: RankPlan) -> None:
    """Raises `PlanError` where the driver lists GPUs, so that they are planned for, and this torch cannot use them."""
    if not plan.on_gpu:
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter by a build of torch for CPUs
        raise PlanError(
            f"{plan.role} {plan.rank} is to run on {plan.device} and torch {torch.__version__} cannot use it "
            f"({' '.join(str(error).split())}): install torch for this driver, or set {plan.role}s.device: cpu"
        ) from error


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
