"""Peaks by device and dtype: vendors' figures from the one table, a measured one on a CPU, and why there is none."""

from __future__ import annotations

import pytest
import torch

from flowtrain.runtime.peaks import peak_flops, vendor_peak


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "float64", 66.9),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A10G", "bfloat16", 70.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_vendor_figures_by_the_drivers_name(device: str, dtype: str, teraflops: float) -> None:
    found = vendor_peak(device, dtype)
    assert found.value == pytest.approx(teraflops * 1e12)
    assert found.source.startswith("vendor: ")
    assert found.source.endswith(f" dense {dtype}")


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ("NVIDIA L4", "float64", "no dense float64 figure of NVIDIA L4"),
        ("NVIDIA GeForce GTX 1080", "float32", "no dense float32 figure of NVIDIA GeForce GTX 1080"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", "is a slice of a device"),
    ],
)
def test_what_is_not_in_the_table_is_unknown_with_its_reason(device: str, dtype: str, why: str) -> None:
    found = vendor_peak(device, dtype)
    assert found.value is None
    assert why in found.source


def test_a_cpu_peak_is_measured_once_and_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    peak = peak_flops("cpu", "float32", 1)
    assert peak.source == "measured: float32 matrix product on 1 CPU thread"
    assert peak.value is not None
    assert 1e8 < peak.value < 1e14
    assert peak_flops("cpu", "float32", 1) is peak
    assert torch.get_num_threads() == before
