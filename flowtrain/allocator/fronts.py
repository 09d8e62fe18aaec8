"""What a group of modules on the same devices can do: numbers of devices, seconds a sample, packs (pure, vectorised).

A group's modules take turns: their seconds add up, and their memory adds up on each device. For one module the group is
the module. Points that others beat are left out:

| kept for | beaten by a point with no more devices, no more seconds and |
|---|---|
| a group without fill and drain | nothing else: a staircase, seconds fall strictly as devices grow |
| the backbone of a trainable encoder elsewhere | no fewer packs |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator.load import Floats, Integers
from flowtrain.allocator.options import Options

OUT_OF_REACH = np.int64(1) << 40
"""Devices of what cannot be had at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Points of a group on one kind of node, by devices; `rows[i]` are rows of the options of its i-th module."""

    devices: Integers
    seconds: Floats
    packs: Integers
    rows: tuple[Integers, ...]

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, rows: Integers) -> Front:
        return Front(self.devices[rows], self.seconds[rows], self.packs[rows], tuple(r[rows] for r in self.rows))


def group_front(members: Sequence[Options], backbone: int | None, capacity: float, keep_packs: bool) -> Front:
    """The front of modules that share devices. `backbone`: which of them is it, whose packs count."""
    found, memory = _single(members[0], keep_packs and backbone == 0, shared=len(members) > 1)
    for number, other in enumerate(members[1:], start=1):
        right, right_memory = _single(other, keep_packs and backbone == number, shared=True)
        left_rows, right_rows = _pairs(found.devices, right.devices)
        together = memory[left_rows] + right_memory[right_rows]
        fits = together <= capacity
        left_rows, right_rows, memory = left_rows[fits], right_rows[fits], together[fits]
        found = Front(
            found.devices[left_rows],
            found.seconds[left_rows] + right.seconds[right_rows],
            right.packs[right_rows] if backbone == number else found.packs[left_rows],
            (*(rows[left_rows] for rows in found.rows), right.rows[0][right_rows]),
        )
        kept = _unbeaten(found.devices, found.seconds, memory, found.packs if keep_packs else None)
        found, memory = found.take(kept), memory[kept]
    return found


def limit_bandwidth(front: Front, seconds_per_device: float) -> Front:
    """No faster than the group's devices move its bytes: `seconds_per_device` / devices a sample."""
    return replace(front, seconds=np.maximum(front.seconds, seconds_per_device / front.devices))


def staircase(front: Front, keep_packs: bool) -> Front:
    """Without the points that fewer devices beat, in order of devices."""
    if not keep_packs:
        order = np.lexsort((front.seconds, front.devices))
        best = np.minimum.accumulate(front.seconds[order])
        falls = np.r_[True, best[1:] < best[:-1]] if len(order) else np.zeros(0, dtype=bool)
        return front.take(order[falls])
    order = np.lexsort((front.seconds, front.devices))
    return front.take(order)


def need(stairs: Front, seconds: Floats | float) -> Integers:
    """Fewest devices with which the group takes no more than `seconds` a sample."""
    at = np.searchsorted(-stairs.seconds, -np.asarray(seconds, dtype=np.float64), side="left")
    fewest: Integers = np.append(stairs.devices, OUT_OF_REACH)[at]
    return fewest


def _single(module: Options, keep_packs: bool, shared: bool) -> tuple[Front, Floats]:
    memory = module.memory_bytes if shared else np.zeros(len(module))
    seconds = module.shared_seconds if shared else module.seconds
    kept = _unbeaten(module.devices, seconds, memory, module.packs if keep_packs else None)
    return Front(module.devices[kept], seconds[kept], module.packs[kept], (kept,)), memory[kept]


def _unbeaten(devices: Integers, seconds: Floats, memory: Floats, packs: Integers | None) -> Integers:
    """Rows not beaten by one with as many devices (and as many packs, where these count), in order of devices.

    Sorted by memory within a number of devices, a row stays when it is faster than all before it.
    """
    if not len(devices):
        return np.zeros(0, dtype=np.int64)
    key = devices if packs is None else devices * (int(packs.max()) + 1) + packs
    order = np.lexsort((seconds, memory, key))
    first = np.r_[True, key[order][1:] != key[order][:-1]]
    # Seconds as ranks, lowered from group to group: then one running minimum serves all groups.
    rank = np.unique(seconds[order], return_inverse=True)[1]
    lowered = rank - (np.cumsum(first) - 1) * (len(order) + 1)
    before = np.r_[lowered[0] + 1, np.minimum.accumulate(lowered)[:-1]]
    kept: Integers = order[first | (lowered < before)]
    return kept


def _pairs(left: Integers, right: Integers) -> tuple[Integers, Integers]:
    """Rows (i, j) with left[i] == right[j]; both are ascending."""
    start, end = np.searchsorted(right, left, "left"), np.searchsorted(right, left, "right")
    count = end - start
    rows = np.repeat(np.arange(len(left)), count)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, np.repeat(start, count) + offset
