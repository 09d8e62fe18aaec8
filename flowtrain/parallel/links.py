"""What goes between the sections of a pipeline: hidden states forward, their gradients backward.

Sends do not wait, receives do: a rank waits for its neighbour, never for a third one. Shapes are known to both sides
from the pack's tokens, so nothing is told ahead. Forward and backward have a group each, and within one of them a rank
takes in the order in which its neighbour sent (`flowtrain.pipeline`), so no message needs a name.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from flowtrain.parallel.groups import Groups

SENDS_KEPT = 4
"""Messages for each pack under way whose memory is kept until they are known to have arrived."""


class Links:
    """One rank's; `waited_seconds`: spent in receives so far. Every wait has the time-out of its group."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        assert groups.lines is not None, "a pipeline of one rank sends nothing"
        self._groups = groups.lines
        self._device = device
        self._kept = SENDS_KEPT * groups.layout.packs_held
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.waited_seconds = 0.0

    def send(self, tensor: torch.Tensor, forward: bool) -> None:
        """To the rank with the next section, or with the one before; the tensor is not changed from here on."""
        group = self._groups[not forward]
        own = tensor.detach().contiguous()
        self._sent.append((dist.isend(own, self._neighbour(group, 1 if forward else -1), group=group), own))
        while len(self._sent) > self._kept:
            self._sent.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, forward: bool) -> torch.Tensor:
        """From the rank with the section before, or with the next one where it is a gradient."""
        start = time.perf_counter()
        group = self._groups[not forward]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, self._neighbour(group, -1 if forward else 1), group=group)
        self.waited_seconds += time.perf_counter() - start
        return tensor

    def flush(self) -> None:
        """All that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    @staticmethod
    def _neighbour(group: Any, distance: int) -> int:
        return dist.get_global_rank(group, (dist.get_rank(group) + distance) % dist.get_world_size(group))
