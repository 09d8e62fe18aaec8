"""Peak FLOP/s of a device: the vendor's dense figure where it is known, else a measured matrix product (contract C13).

| device | source |
|---|---|
| a GPU in the table, dtype in its row | `vendor: NAME dense DTYPE` |
| any other GPU | `measured: …` on it |
| CPU | `measured: …` with the rank's number of threads |

torch is loaded only when a peak is asked for. Measured peaks are kept for the life of the process.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MEASURE_DIM = 1024
MEASURE_SECONDS = 0.25
TERA = 1e12


class Peak(NamedTuple):
    """`value` in FLOP/s of one device; `source` says whose figure it is."""

    value: float
    source: str


VENDOR_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250.0, "float64": 37.0},
    "GB200": {"bfloat16": 2500.0, "float64": 40.0},
    "H200": {"bfloat16": 989.4, "float32": 66.9, "float64": 66.9},
    "H100 NVL": {"bfloat16": 835.0, "float32": 60.0, "float64": 60.0},
    "H100 PCIe": {"bfloat16": 756.0, "float32": 51.2, "float64": 51.2},
    "H100": {"bfloat16": 989.4, "float32": 66.9, "float64": 66.9},
    "H20": {"bfloat16": 148.0, "float32": 44.0},
    "A100": {"bfloat16": 312.0, "float32": 19.5, "float64": 19.5},
    "A800": {"bfloat16": 312.0, "float32": 19.5, "float64": 19.5},
    "L40S": {"bfloat16": 362.0, "float32": 91.6},
    "L4": {"bfloat16": 121.0, "float32": 30.3},
    "A10G": {"bfloat16": 70.0, "float32": 35.0},
    "A10": {"bfloat16": 125.0, "float32": 31.2},
}
"""Dense TFLOP/s of the data sheets: tensor cores for bfloat16 and float64, plain ones for float32 (no TF32)."""


def vendor_peak(device_name: str, dtype: str) -> Peak | None:
    """The data sheet's figure for a device as its driver names it (`NVIDIA H100 80GB HBM3`), or None."""
    words = device_name.replace("-", " ").split()
    for name in sorted(VENDOR_TFLOPS, key=len, reverse=True):
        wanted = name.split()
        inside = any(words[at : at + len(wanted)] == wanted for at in range(len(words)))
        if inside and dtype in VENDOR_TFLOPS[name]:
            return Peak(VENDOR_TFLOPS[name][dtype] * TERA, f"vendor: {name} dense {dtype}")
        if inside:
            return None
    return None


@cache
def peak_flops(device: str, dtype: str, threads: int) -> Peak:
    """Peak of one rank's device for `dtype` (torch's name); `threads` matter on a CPU only."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        known = vendor_peak(torch.cuda.get_device_name(place), dtype)
        if known is not None:
            return known
    before = torch.get_num_threads()
    if place.type == "cpu":
        torch.set_num_threads(threads)
    try:
        value = _measure(place, getattr(torch, dtype))
    finally:
        torch.set_num_threads(before)
    where = f"{threads} CPU thread{'s' if threads != 1 else ''}" if place.type == "cpu" else place.type
    return Peak(value, f"measured: {dtype} matrix product on {where}")


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """Fastest of several square products, in FLOP/s."""
    import torch

    left = torch.ones((MEASURE_DIM, MEASURE_DIM), device=device, dtype=dtype)
    right = torch.ones_like(left)
    out = torch.empty_like(left)
    fastest = float("inf")
    spent = 0.0
    torch.mm(left, right, out=out)
    with torch.no_grad():
        while spent < MEASURE_SECONDS:
            _wait(device)
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            _wait(device)
            seconds = time.perf_counter() - start
            fastest, spent = min(fastest, seconds), spent + seconds
    return 2.0 * MEASURE_DIM**3 / fastest


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
