"""Work that several devices do together, and how a device lets time pass.

A call of a model whose parameters are cut over devices is a collective: it starts once all are there, and takes as long
as the slowest's. Devices that meet so may be in any processes of this machine, since they see each other on a board:

    one file for a side, [groups, members, 2, 3]        a row a device, which alone writes it
    ┌ device 0   (number, ready, seconds) of even works, (…) of odd works
    └ device 1   …                        each sleeps until its own end, by when the others have come, or are late

Two places are enough: whoever is at a work has seen all others at the one before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowtrain.errors import PeerError
from flowtrain.parallel.mesh import dp_rank
from flowtrain.plan import Layout
from flowtrain.types import Role

LOOK_SECONDS = 1e-3
"""Between two looks for a device that is late."""


def pause_until(moment: float) -> None:
    """Sleep until `moment` of `time.perf_counter`; returns at once when it is over."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Of the devices of a group. `board`: their rows, [members, 2, 3]; `place`: this one's row."""

    board: NDArray[np.float64]
    place: int

    @property
    def members(self) -> int:
        return len(self.board)

    def end_of(self, number: int, ready: float, seconds: float, timeout: float) -> float:
        """When the `number`-th work of all ends (from 1); this device could begin at `ready` and would take `seconds`.

        Each comes to every work, in the same order. Returns at this device's own end at the earliest.

        Raises:
            PeerError: the others did not come in time.
        """
        of_all = self.board[:, number % 2]
        mine = of_all[self.place]
        mine[1:] = ready, seconds
        mine[0] = number  # last: the others look at it
        pause_until(ready + seconds)
        deadline = time.perf_counter() + timeout
        while (present := int(np.count_nonzero(of_all[:, 0] == number))) < self.members:
            if time.perf_counter() > deadline:
                raise PeerError(f"{present} of {self.members} devices came within {timeout:g} s to work {number}")
            time.sleep(LOOK_SECONDS)
        return float(of_all[:, 1].max() + of_all[:, 2].max())


def make_boards(run_dir: Path, layouts: dict[Role, Layout]) -> None:
    """Nobody has come to any work yet. New files: devices of an earlier run may still see the old ones."""
    for role, layout in layouts.items():
        file = _file(run_dir, role)
        file.unlink(missing_ok=True)
        np.zeros(_shape(layout)).tofile(file)


def enter(run_dir: Path, role: Role, layout: Layout, rank: int) -> Meeting:
    """The meeting of a rank with those over which its parameters are cut; without such it meets nobody."""
    shape = _shape(layout)
    if shape[1] == 1:
        return Meeting(np.zeros(shape[1:]), 0)
    group = _group(layout, rank)
    members = [other for other in range(layout.world_size) if _group(layout, other) == group]
    return Meeting(np.memmap(_file(run_dir, role), np.float64, "r+", shape=shape)[group], members.index(rank))


def _group(layout: Layout, rank: int) -> int:
    return dp_rank(layout, rank) // layout.dp_shard


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    groups = layout.dp_degree // layout.dp_shard
    return groups, layout.world_size // groups, 2, 3


def _file(run_dir: Path, role: Role) -> Path:
    return run_dir / f"meetings-{role}"
