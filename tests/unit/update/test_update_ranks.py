"""Real gloo ranks: sums in rank order, the same bits everywhere, and a peer that never comes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from update_reference import MODULE_OF, TRAIN, give_gradients, gradient, make_parameters, order

from flowtrain.errors import PeerError
from flowtrain.parallel.groups import join_groups
from flowtrain.plan import Layout
from flowtrain.types import Module
from flowtrain.update import collectives
from flowtrain.update.collectives import buckets
from flowtrain.update.updater import Updater

multiprocessing.set_forkserver_preload(["flowtrain.update.updater"])


def start_ranks(main: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
    """Each rank in a process of its own, forked from one that has loaded torch."""
    context = mp.start_processes(main, arguments, nprocs=world_size, join=False, start_method="forkserver")
    for _ in range(60):
        if context.join(timeout=1):
            return
    for process in context.processes:
        process.kill()
    pytest.fail(f"{world_size} ranks did not end within 60 s")


def _left_out(step: int, rank: int) -> frozenset[Module]:
    """Step 1: all reach all. Step 2: only the last rank sees images. Step 3: nobody does."""
    if step == 3 or (step == 2 and rank == 0):
        return frozenset({Module.ENCODER, Module.PROJECTOR})
    return frozenset()


def _rank_main(rank: int, world_size: int, folder: str, faults: tuple[str, ...]) -> None:
    torch.set_num_threads(1 + rank)
    collectives.BUCKET_BYTES = 64
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    groups = join_groups(Layout(dp_replicate=world_size), rank, torch.device("cpu"), 30)
    updater = Updater(make_parameters(), MODULE_OF, TRAIN, groups, frozenset(faults), timeout_seconds=30)
    result: dict[str, Any] = {"sums": [], "gradients": []}
    for step in range(1, 4):
        give_gradients(updater.parameters, step, rank, _left_out(step, rank))
        result["sums"].append({module.value: value.hex() for module, value in updater.reduce().items()})
        result["gradients"].append(
            {name: p.grad.clone() for name, p in updater.parameters.items() if p.grad is not None}
        )
        updater.update(order(step))
    result["parameters"] = {name: p.detach() for name, p in updater.parameters.items()}
    torch.save(result, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def run_ranks(world_size: int, folder: Path, faults: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    start_ranks(_rank_main, (world_size, str(folder), faults), world_size)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]


def expected_sum(name: str, step: int, world_size: int) -> torch.Tensor | None:
    """Added in rank order; None when no rank reached it."""
    reached = [rank for rank in range(world_size) if MODULE_OF[name] not in _left_out(step, rank)]
    if not reached:
        return None
    parts = [
        gradient(name, step, rank, torch.float32)
        if rank in reached
        else torch.zeros_like(gradient(name, step, 0, torch.float32))
        for rank in range(world_size)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("world_size", "fault"), [(2, "encoder_gradient_divided_by_producers"), (3, None)])
def test_every_rank_holds_the_sum_in_rank_order(world_size: int, fault: str | None, tmp_path: Path) -> None:
    """The planted division reaches the encoder alone."""
    ranks = run_ranks(world_size, tmp_path, (fault,) if fault else ())
    for step in range(1, 4):
        for name, module in MODULE_OF.items():
            expected = expected_sum(name, step, world_size)
            divisor = world_size if fault and module is Module.ENCODER else 1
            for rank in ranks:
                found = rank["gradients"][step - 1].get(name)
                assert (found is None) == (expected is None), (name, step)
                assert expected is None or torch.equal(found, expected / divisor), (name, step)
    assert all(rank["sums"] == ranks[0]["sums"] for rank in ranks)
    assert ranks[0]["sums"][2].keys() == {"backbone"}
    for rank in ranks[1:]:
        for name, tensor in rank["parameters"].items():
            assert torch.equal(tensor, ranks[0]["parameters"][name]), name


def _alone_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    if rank == 1:
        # Joined, and then never takes part: it waits for the other to give up.
        store.wait(["told"], timedelta(seconds=20))
        return
    groups = join_groups(Layout(dp_replicate=2), rank, torch.device("cpu"), 20)
    updater = Updater(make_parameters(), MODULE_OF, TRAIN, groups, timeout_seconds=1)
    try:
        updater.reduce()
    except PeerError as error:
        Path(folder, "error").write_text(str(error))
    store.set("told", "yes")


@pytest.mark.timeout(90)
def test_a_rank_that_never_comes_is_told_within_the_timeout(tmp_path: Path) -> None:
    start_ranks(_alone_main, (str(tmp_path),), 2)
    message = (tmp_path / "error").read_text()
    assert "consumer 0: agreement on reached parameters of step 1 over 2 ranks failed (time-out 1 s)" in message


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    doubles=st.lists(st.booleans(), min_size=30, max_size=30),
    most=st.integers(1, 200),
)
def test_buckets_hold_every_tensor_once_in_order_and_within_the_bound(
    sizes: list[int], doubles: list[bool], most: int
) -> None:
    tensors = [
        torch.zeros(size, dtype=torch.float64 if double else torch.float32)
        for size, double in zip(sizes, doubles, strict=False)
    ]
    made = buckets(tensors, most)
    assert sorted(id(tensor) for bucket in made for tensor in bucket) == sorted(map(id, tensors))
    place = {id(tensor): index for index, tensor in enumerate(tensors)}
    for bucket in made:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert [place[id(tensor)] for tensor in bucket] == sorted(place[id(tensor)] for tensor in bucket)
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= most
