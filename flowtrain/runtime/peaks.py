"""Peak FLOP/s of a rank's device: the vendor's dense figure, on a CPU a measured matrix product (contract C13).

| device | peak | source |
|---|---|---|
| a GPU of `allocator.hardware` with a figure for the dtype | that figure | `vendor: NAME dense DTYPE` |
| any other GPU, a slice of one (MIG) | None | why it is not known |
| CPU | measured with the rank's number of threads | `measured: …` |

A measured peak is kept for the life of the process.
"""

from __future__ import annotations

import time
from functools import cache

import torch

from flowtrain.allocator.hardware import node_type
from flowtrain.errors import PlanError
from flowtrain.telemetry.mfu import Peak

MEASURE_DIM = 1024
MEASURE_SECONDS = 0.25


def vendor_peak(device_name: str, dtype: str) -> Peak:
    """The data sheet's figure for a device as its driver names it (`NVIDIA H100 80GB HBM3`), or why there is none."""
    if "MIG" in device_name.split():
        return Peak(None, f"unknown: {device_name} is a slice of a device")
    try:
        node = node_type(device_name)
        return Peak(node.peak(dtype), f"vendor: {node.name} dense {dtype}")
    except PlanError:
        return Peak(None, f"unknown: no dense {dtype} figure of {device_name} is in the table of devices")


@cache
def peak_flops(device: str, dtype: str, threads: int) -> Peak:
    """Peak of one rank's device for `dtype` (torch's name); `threads` matter on a CPU only."""
    place = torch.device(device)
    if place.type == "cuda":
        return vendor_peak(torch.cuda.get_device_name(place), dtype)
    if place.type != "cpu":
        return Peak(None, f"unknown: {place.type} devices are not in the table")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        value = _measure(getattr(torch, dtype))
    finally:
        torch.set_num_threads(before)
    return Peak(value, f"measured: {dtype} matrix product on {threads} CPU thread{'s' if threads != 1 else ''}")


def _measure(dtype: torch.dtype) -> float:
    """Fastest of several square products on the CPU, in FLOP/s."""
    left = torch.ones((MEASURE_DIM, MEASURE_DIM), dtype=dtype)
    right, out = torch.ones_like(left), torch.empty_like(left)
    torch.mm(left, right, out=out)
    fastest, spent = float("inf"), 0.0
    while spent < MEASURE_SECONDS:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds = time.perf_counter() - start
        fastest, spent = min(fastest, seconds), spent + seconds
    return 2.0 * MEASURE_DIM**3 / fastest
