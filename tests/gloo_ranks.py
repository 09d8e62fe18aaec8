"""Processes that stay alive and run functions together over gloo: a collective test costs its work, not a start.

    ranks = Ranks(4)
    ranks.call(function, "argument", world_size=2)   ──▶ [result of rank 0, of rank 1]
    ranks.close()

A function is one of a module that the processes can import; it gets the group of the ranks that take part first. They
are forked from a server that has imported torch and transformers once. An exception on any rank ends the call with it.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT_SECONDS = 60.0
PRELOAD = ["torch", "torch.distributed.fsdp", "transformers", "flowtrain.models.backbone", "flowtrain.models.encoder"]


class Ranks:
    """`num` processes with a group for each number of ranks that divides it: the first 1, 2, … of them."""

    def __init__(self, num: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = TemporaryDirectory(prefix="gloo-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num):
            ours, theirs = context.Pipe()
            target = context.Process(
                target=_serve, args=(rank, num, f"{self._folder.name}/store", theirs), name=f"rank {rank}", daemon=True
            )
            target.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(target)

    def call(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        """`function(group, *args)` on the first ranks; their results in order."""
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            pipe.send((function, args, world_size))
        answers: dict[int, tuple[str | None, Any]] = {}
        while len(answers) < world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
            ready = wait(list(waiting), TIMEOUT_SECONDS * 2)
            assert ready, f"no answer of ranks {sorted(waiting.values())}"
            answers |= {waiting[pipe]: pipe.recv() for pipe in pipes if pipe in ready}
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in sorted(answers.items()) if failure is not None]
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, num: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    Path(store).parent.mkdir(exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num, timeout=timeout)
    sizes = [size for size in range(1, num + 1) if num % size == 0]
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in sizes}
    while True:
        try:
            function, args, world_size = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((None, function(groups[world_size], *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
